"""`assay mutate`: exit codes, what is printed, what is left on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from parity.cli import main
from parity.mutation import run
from parity.mutation.catalogue import FAULTS, by_name
from parity.mutation.fault import Fault, drawn, fault
from parity.mutation.planting import swap
from tests.engine.families.committed_golden import needs_goldens

SEED = "sampler-seed/seed/one-more"
UNSEEN = fault(
    "sampler window",
    "test",
    "unseen",
    says="a function does what it should",
    at="token_ids",
    cases=drawn("t07"),
    plant=swap("engine.sampling.chain:draw", lambda right: right),
)


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """The faults that the verb finds; a test may change them."""
    faults = [by_name(SEED)]
    right = run.chosen
    monkeypatch.setattr(run, "chosen", lambda pattern, sample: right(pattern, sample, faults))
    return faults


@needs_goldens
@pytest.mark.usefixtures("catalogue")
def test_all_caught_is_0_and_the_report_is_left(capsys: pytest.CaptureFixture[str], results_folder: Path) -> None:
    assert main(["mutate", "--jobs", "1"]) == 0

    out, err = capsys.readouterr()
    assert out == (
        "kind          faults  caught  localised  seen after\n"
        "sampler seed  1       1       1          1\n\n"
        "1 fault: 1 caught, 1 localised (100.0 %); 1 clean run, 0 false alarms\n"
    )
    assert err == f"1 of 1  CAUGHT  {SEED}\n"
    assert sorted(file.name for file in results_folder.iterdir()) == ["mutation.json", "mutation.md"]


@needs_goldens
def test_a_hole_is_1_and_has_a_message(catalogue: list[Fault], capsys: pytest.CaptureFixture[str]) -> None:
    catalogue.append(UNSEEN)

    assert main(["mutate", "--jobs", "1"]) == 1

    out = capsys.readouterr().out
    assert "fault sampler-window/test/unseen was seen by no case\n  says   a function does what it should\n" in out
    assert out.endswith("2 faults: 1 caught, 1 localised (50.0 %), 1 holes; 2 clean runs, 0 false alarms\n")


@needs_goldens
def test_json_is_one_object_with_the_promised_keys(catalogue: list[Fault], capsys: pytest.CaptureFixture[str]) -> None:
    catalogue.append(UNSEEN)

    assert main(["mutate", "--json", "--jobs", "1"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in ("total", "caught", "localised", "false_alarms", "holes")} == {
        "total": 2,
        "caught": 1,
        "localised": 1,
        "false_alarms": 0,
        "holes": ["sampler-window/test/unseen"],
    }


@needs_goldens
@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize("part", [["sampler-*"], ["--sample", "1"]])
def test_a_part_of_the_faults_leaves_a_report_only_where_it_is_asked_for(
    part: list[str], results_folder: Path, tmp_path: Path
) -> None:
    assert main(["mutate", *part, "--jobs", "1"]) == 0
    assert not results_folder.exists()
    assert main(["mutate", *part, "--jobs", "1", "--results", str(tmp_path / "here")]) == 0
    assert (tmp_path / "here" / "mutation.json").exists()


def test_the_list_tries_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(*_: object, **__: object) -> Any:
        raise AssertionError

    monkeypatch.setattr(run, "mutate", tried)
    assert main(["mutate", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FAULTS)
    assert lines[0].split("  ")[0] == FAULTS[0].name

    assert main(["mutate", "--list", "--json", "--sample", "35"]) == 0
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 35


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-fault"], "no fault matches 'no-such-fault'\n"),
        (["--sample", "0"], "argument --sample: '0' is not a whole number of at least 1\n"),
        (["--jobs", "two"], "argument --jobs: 'two' is not a whole number of at least 1\n"),
    ],
)
def test_what_cannot_be_met_is_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_report_that_cannot_be_written_is_told_before_anything_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()

    assert main(["mutate", "--results", str(file)]) == 2
    assert capsys.readouterr().err.startswith("the report cannot be written\n  folder  ")
