import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parity.mutation.report import closing, markdown, messages, save, summary, to_json
from parity.mutation.run import Mutation
from parity.mutation.trial import Answer, Fate, Outcome

Make = Callable[..., Outcome]
MESSAGES = """
fault eps/llama/c was seen by no case
  says   eps of a norm is wrong
  where  model.norm
  asked  2 cases
  next   a case that sees it: parity/cases, assay record

fault mask/llama/d is none
  says   eps of a norm is wrong
  where  model.norm
  asked  1 cases
  why    never reached
  next   mend parity/mutation/catalogue

fault eps/llama/b was seen first elsewhere
  says   eps of a norm is wrong
  where  model.norm
  asked  1 cases
  found  model
  next   correct where it is, or declare why it is hidden

fault eps/llama/g was localised, though it is declared to be hidden
  says    eps of a norm is wrong
  where   model.norm
  asked   1 cases
  hidden  nobody looks there
  next    take the reason out

fault mask/llama/e had a control that differs
  says     eps of a norm is wrong
  where    model.norm
  asked    1 cases
  control  toy/b: DIFFERENT, model
  next     assay check 'toy/b'
"""
ELSEWHERE = Answer(case="toy/b", identical=False, steps=3, found="model", status="DIFFERENT")


@pytest.fixture
def mixed(outcome: Make) -> Mutation:
    good = outcome()
    return Mutation(
        outcomes=(
            good,
            replace(good, fault="eps/llama/b", seen=ELSEWHERE),
            replace(good, fault="eps/llama/c", fate=Fate.HOLE, seen=None, asked=2),
            replace(good, fault="mask/llama/d", kind="mask", fate=Fate.VOID, seen=None, why="never reached"),
            replace(good, fault="mask/llama/e", kind="mask", control=ELSEWHERE),
            replace(good, fault="mask/llama/f", kind="mask", seen=ELSEWHERE, hidden="it | cannot be seen"),
        )
    )


def test_the_first_five_keys_are_those_that_are_promised(mixed: Mutation) -> None:
    described = to_json(mixed)

    assert list(described)[:5] == ["total", "caught", "localised", "false_alarms", "holes"]
    assert [described[key] for key in list(described)[:5]] == [6, 4, 2, 1, ["eps/llama/c"]]
    assert (described["void"], described["misplaced"], described["clean_runs"]) == (
        ["mask/llama/d"],
        ["eps/llama/b"],
        6,
    )
    assert described["faults"][1] == {
        "fault": "eps/llama/b",
        "kind": "eps",
        "says": "eps of a norm is wrong",
        "at": "model.norm",
        "fate": "CAUGHT",
        "case": "toy/b",
        "status": "DIFFERENT",
        "steps": 3,
        "found": "model",
        "localised": False,
        "hidden": None,
        "false_alarm": False,
        "why": None,
    }


def test_kinds_are_counted(mixed: Mutation) -> None:
    assert summary(mixed) == [("eps", "3", "2", "1", "1 to 3"), ("mask", "3", "2", "1", "1 to 3")]


def test_the_closing_line_tells_all(mixed: Mutation, outcome: Make) -> None:
    assert closing(mixed) == (
        "6 faults: 4 caught, 2 localised (33.3 %), of modules 2 of 6 (33.3 %), 1 holes, 1 void, 1 misplaced; "
        "6 clean runs, 1 false alarm"
    )
    assert closing(Mutation(outcomes=(outcome(),))) == (
        "1 fault: 1 caught, 1 localised (100.0 %), of modules 1 of 1 (100.0 %); 1 clean run, 0 false alarms"
    )


def test_what_is_no_module_is_not_counted_as_one(outcome: Make) -> None:
    drawn = Answer(case="toy/d", identical=False, steps=1, found="token_ids", status="DIFFERENT")
    mutation = Mutation(outcomes=(replace(outcome(), at="token_ids", seen=drawn), replace(outcome(), seen=ELSEWHERE)))

    described = to_json(mutation)
    assert (described["localised"], described["module_localised"], described["module_faults"]) == (1, 0, 1)
    assert "1 localised (50.0 %), of modules 0 of 1 (0.0 %)" in closing(mutation)


def test_every_fault_that_is_not_as_it_must_be_has_a_message(mixed: Mutation, outcome: Make) -> None:
    found_after_all = replace(outcome(), fault="eps/llama/g", hidden="nobody looks there")

    told = messages(Mutation(outcomes=(*mixed.outcomes, found_after_all)))

    assert told == [text.strip("\n") for text in MESSAGES.split("\n\n")]


def test_the_report_lists_every_fault_and_what_went_wrong(mixed: Mutation) -> None:
    text = markdown(mixed)

    assert "| eps | 3 | 2 | 1 | 1 to 3 |" in text
    assert (
        "## Holes\n\n| fault | what is wrong | where | found | said |\n| --- | --- | --- | --- | --- |\n| eps/llama/c |"
        in text
    )
    assert [title for title in ("No faults", "Misplaced", "False alarms") if f"## {title}\n" not in text] == []
    assert "| mask/llama/f | model.norm | model | it \\| cannot be seen |" in text
    rows = text.partition("## All faults\n")[2].strip().splitlines()[2:]
    assert len(rows) == 6


def test_a_report_without_faults_in_it_has_no_empty_tables(outcome: Make) -> None:
    text = markdown(Mutation(outcomes=(outcome(),)))

    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## All faults"]


def test_equal_runs_give_equal_files(mixed: Mutation, tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(mixed, tmp_path / name)
    one, two = ([f.read_bytes() for f in sorted((tmp_path / name).iterdir())] for name in ("one", "two"))

    assert one == two
    assert json.loads((tmp_path / "one" / "mutation.json").read_text()) == to_json(mixed)
    assert (tmp_path / "one" / "mutation.md").read_text() == markdown(mixed)
