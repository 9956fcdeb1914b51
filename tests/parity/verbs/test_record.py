import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from oracles.journal import Journal
from parity.errors import UsageError
from parity.golden import Golden, golden_path
from parity.platform_key import platform_key
from parity.verbs import record
from tests.oracles.shop import Shop, fake_oracle, make_case

CASES = tuple(make_case(f"tiny/f32/fp/greedy/p{i}", prompt_ids=(1, 2, i)) for i in range(3))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "home"))
    shop = Shop(tmp_path, fake_oracle(tmp_path))
    monkeypatch.setattr("parity.matrix.load_cases", lambda: CASES)
    monkeypatch.setattr("parity.models.fetch.ensure_snapshot", shop.workshop.snapshot_of)
    monkeypatch.setattr(record, "find_oracle", lambda _name: shop.oracle)
    monkeypatch.setattr(record, "ensure_environment", lambda _oracle, **_options: Path(sys.executable))
    monkeypatch.setattr(record, "GOLDENS", shop.goldens)
    return shop


def run(*arguments: str, as_json: bool = False) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    record.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args([*(["--json"] if as_json else []), "record", "--jobs", "1", *arguments])
    return args.run(args)


def test_recording_writes_goldens_says_how_many_and_shows_progress_in_plain_lines(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    said = capsys.readouterr()
    assert said.out == "3 new\n"
    assert said.err.splitlines() == [f"{i + 1} of 3  new  {case.name}" for i, case in enumerate(CASES)]
    for case in CASES:
        Golden.load(golden_path(case, version="1.0", root=shop.goldens))


def test_a_pattern_chooses_cases_and_leaves_the_others_goldens_alone(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    capsys.readouterr()
    shop.faults(salt="x")
    assert run("*/p1", "--reason", "meant") == 0
    assert capsys.readouterr().out == "1 changed\n"
    assert len(shop.runs) == 4


def test_an_unknown_name_is_a_usage_error_and_records_nothing(shop: Shop) -> None:
    with pytest.raises(UsageError):
        run("tiny/f32/fp/greedy/p9")
    assert shop.runs == []


def test_a_refusal_is_shown_and_exits_2(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    capsys.readouterr()
    shop.faults(salt="x")
    assert run("*/p0") == 2
    said = capsys.readouterr()
    assert said.out == "1 refused\n"
    assert f"the golden of {CASES[0].name} would change, and nothing explains it" in said.err


def test_json_is_one_object_and_nothing_else(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    run("*/p0")
    shop.faults(**{"raise": [CASES[1].name], "salt": "x"})
    capsys.readouterr()
    assert run(as_json=True) == 2
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"counts", "cases", "unused", "pruned"}
    assert result["counts"] == {"refused": 1, "failed": 1, "new": 1}
    refused, failed, new = result["cases"]
    assert refused["error"]["kind"] == "golden"
    assert failed["error"]["kind"] == "oracle"
    assert failed["error"]["next"].startswith("correct the case")
    assert new == {"case": CASES[2].name, "status": "new", "resumed": False, "error": None}


def test_prune_removes_what_no_case_claims_and_nothing_else_does(
    shop: Shop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    monkeypatch.setattr("parity.matrix.load_cases", lambda: CASES[:2])
    orphan = golden_path(CASES[2], version="1.0", root=shop.goldens)
    capsys.readouterr()
    run()
    assert f"unused (--prune removes it): {orphan.relative_to(shop.goldens)}" in capsys.readouterr().out
    assert orphan.exists()
    run("--prune")
    assert f"unused removed: {orphan.relative_to(shop.goldens)}" in capsys.readouterr().out
    assert not orphan.exists()
    assert golden_path(CASES[1], version="1.0", root=shop.goldens).exists()


def test_nothing_is_pruned_while_a_case_has_no_golden(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setattr("parity.matrix.load_cases", lambda: CASES[:2])
    shop.faults(**{"raise": [CASES[0].name]})
    assert run("--prune") == 2
    assert golden_path(CASES[2], version="1.0", root=shop.goldens).exists()


def test_into_writes_elsewhere(shop: Shop, tmp_path: Path) -> None:
    assert run("--into", str(tmp_path / "sample")) == 0
    assert len(shop.files(tmp_path / "sample")) == 6
    assert not shop.goldens.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "--jobs needs at least one process"),
        (["--reason", " "], "--reason is empty"),
        (["--prune", "--into", "x"], "--prune and --into contradict each other"),
    ],
)
def test_options_that_make_no_sense_are_refused(shop: Shop, arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*arguments)
    assert shop.runs == []


@pytest.mark.usefixtures("shop")
def test_if_none_records_on_a_platform_without_goldens_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--if-none") == 0
    said = capsys.readouterr()
    assert said.out == "3 new\n"
    assert said.err.splitlines()[0] == (
        f"goldens for {platform_key()}: there are none yet; building the oracle and recording them"
    )


def test_if_none_does_nothing_where_goldens_are(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    capsys.readouterr()
    shop.faults(salt="x")
    assert run("--if-none") == 0
    assert capsys.readouterr() == ("", "")
    assert len(shop.runs) == 3


def test_if_none_resumes_a_recording_that_was_interrupted(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    run("*/p1")
    Journal.of(shop.goldens).folder.mkdir(parents=True)
    capsys.readouterr()
    assert run("--if-none") == 0
    assert "an interrupted recording has not ended" in capsys.readouterr().err
    assert len(list(shop.goldens.rglob("*.json"))) == 3


def test_opt_in_cases_are_left_out_and_that_is_said(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gemma = make_case("gemma3-270m/f32/fp/greedy/p1", snapshot="gemma3-270m")
    monkeypatch.setattr("parity.matrix.load_cases", lambda: (*CASES, gemma))
    assert run() == 0
    said = capsys.readouterr()
    assert said.out == "3 new\n"
    assert said.err.splitlines()[0] == "left out: 1 case of gemma3-270m (opt-in: 'gemma3-270m/*' chooses them)"
    assert not golden_path(gemma, version="1.0", root=shop.goldens).exists()
