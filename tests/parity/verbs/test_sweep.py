import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.cli import main
from parity.sweeping.findings import Finding
from parity.sweeping.outcome import Outcome
from parity.sweeping.row import Row
from parity.verbs import sweep

EQUAL = Outcome(verdict="equal")
LOGIC = Outcome(verdict="different", where="row 0", size=2.0, max_ulp=9)
KNOWN = Finding(subject="engine", rows=("a/*",), what="It pads.", right="It does not.")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Row]:
    """Rows that a stand-in answers, and no known differences; results go to a folder of the test's own."""
    rows: list[Row] = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()

    def answered(subject: str, *_: Any) -> Iterator[Row]:
        yield from (Row.from_json(row.to_json(), subject=subject) for row in rows)

    monkeypatch.setattr(sweep, "_asked", answered)
    monkeypatch.setattr(sweep, "load_findings", tuple)
    return rows


def row(model: str, outcome: Outcome) -> Row:
    return Row(model=model, dtype="f32", kv="fp", invariance="in-pieces", outcome=outcome)


def test_equal_rows_are_counted_and_exit_with_0(asked: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    asked.append(row("a", EQUAL))

    assert main(["sweep"]) == 0
    assert capsys.readouterr().out == ("1 asked: 1 equal, 0 different, 0 refused\n0 known differences, 0 new, 0 gone\n")


def test_a_new_difference_is_named_and_exits_with_1(asked: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    asked.append(row("a", LOGIC))

    assert main(["sweep"]) == 1
    said = capsys.readouterr()
    assert "NEW   engine: a/f32/fp/in-pieces" in said.out
    assert "engine: a/f32/fp/in-pieces: row 0" in said.err


def test_a_known_difference_passes_and_one_that_is_gone_does_not(
    asked: list[Row], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "load_findings", lambda: (KNOWN,))
    asked.append(row("a", LOGIC))
    assert main(["sweep"]) == 0

    asked[:] = [row("a", EQUAL)]
    assert main(["sweep"]) == 1
    assert "GONE  It pads." in capsys.readouterr().out


def test_json_has_the_contract_s_keys_and_lies_on_disk_too(
    asked: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    asked.append(row("a", EQUAL))
    main(["--json", "sweep", "--markdown", "sweep.md"])

    answer = json.loads(capsys.readouterr().out)
    assert {"equal", "different", "refused", "rows"} <= answer.keys()
    assert answer == json.loads(Path("reports/sweep.json").read_text())
    assert "| a | = |" in Path("sweep.md").read_text()


def test_a_pattern_that_matches_nothing_is_told_how_names_look(
    asked: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    del asked

    assert main(["sweep", "nothing/*"]) == 2
    assert capsys.readouterr().err == (
        "no row matches 'nothing/*'\n"
        "  names  MODEL/DTYPE/KV/INVARIANCE, such as llama/f32/fp/in-pieces\n"
        "  next   assay sweep --help\n"
    )


def test_an_oracle_that_cannot_be_swept_is_refused_before_anything_runs(
    asked: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    del asked

    assert main(["sweep", "--oracle", "llama-cpp-python"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "oracle llama-cpp-python cannot be swept"


def test_earlier_results_are_judged_and_shown_with_the_new_ones(
    asked: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    asked.append(row("a", EQUAL))
    main(["sweep", "--results", "first.json"])
    asked[:] = [row("b", EQUAL)]

    assert main(["sweep", "--join", "first.json", "--markdown", "sweep.md"]) == 0
    assert "2 asked: 2 equal" in capsys.readouterr().out
    assert "| a | = |\n| b | = |" in Path("sweep.md").read_text()


def test_earlier_results_that_are_none_are_refused(asked: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    del asked

    assert main(["sweep", "--join", "missing.json"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "earlier results of a sweep cannot be read"
