"""`assay report`: what it reads, what it writes, and what it says where there is nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.history import append, history_file, identity
from parity.cli import main
from parity.reporting.results import save_check

GOLDEN = "llama-tiny/f32/fp/forced/p40-taps-tail-split"


@pytest.fixture
def filled(results_folder: Path) -> Path:
    check = {
        "format": 1, "pattern": "toy/*", "left_out": None, "counts": {"ERROR": 1}, "provenance": [],
        "cases": [{
            "case": "toy/f32/x", "status": "ERROR", "model_type": None, "kv": "fp", "sampler": "greedy",
            "dtype": "f32", "tier": "L1", "oracle": "mlx-lm", "num_steps": 3, "first_step": None, "earliest": None,
            "cause": None, "snapshot": "toy", "feed": "whole", "forced": False, "passes": False, "place": None,
            "what": "toy/f32/x could not be judged", "facts": {"reason": "<b>it broke</b>"}, "next": "look",
            "num_differing": 0, "tensors": [], "rows": [], "judged": None, "believed": None,
        }],
    }  # fmt: skip
    save_check(results_folder, check)
    return results_folder


def run(*line: str) -> int:
    return main(["report", *line])


def test_three_files_appear_beside_the_results_and_are_named(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0

    told = capsys.readouterr().out.splitlines()
    assert told == [str(filled / f"report.{kind}") for kind in ("html", "md", "json")]
    assert json.loads((filled / "report.json").read_text())["overview"]["num_cases"] == 1
    assert "&lt;b&gt;it broke&lt;/b&gt;" in (filled / "report.html").read_text()
    assert r"\<b\>it broke\</b\>" in (filled / "report.md").read_text()


def test_as_json_the_files_are_one_object(filled: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--json", "--results", str(filled), "--into", str(tmp_path / "else")) == 0

    told = json.loads(capsys.readouterr().out)
    assert told == {kind: str(tmp_path / "else" / f"report.{kind}") for kind in ("html", "md", "json")}
    assert all(Path(file).is_file() for file in told.values())
    assert not (filled / "report.html").exists()


def test_two_reports_of_the_same_results_are_the_same_bytes(filled: Path) -> None:
    assert run() == 0
    first = {file.name: file.read_bytes() for file in filled.glob("report.*")}
    assert run() == 0

    assert {file.name: file.read_bytes() for file in filled.glob("report.*")} == first


def test_where_nothing_was_left_the_next_command_is_told(
    capsys: pytest.CaptureFixture[str], results_folder: Path
) -> None:
    assert run("--results", str(results_folder)) == 2

    assert capsys.readouterr().err.splitlines() == [
        "there is nothing to report on",
        f"  looked at  check.json, bench*.json, mutation.json, sweep.json in {results_folder.name}/",
        f"  next       assay check --results {results_folder}",
    ]


def test_a_golden_s_page_shows_its_steps(results_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--golden", GOLDEN) == 0

    page, text, facts = (Path(line) for line in capsys.readouterr().out.splitlines())
    assert page == results_folder / "goldens" / f"{GOLDEN.replace('/', '--')}.html"
    described: dict[str, Any] = json.loads(facts.read_text())
    assert (described["case"], described["exact"], len(described["steps"])) == (GOLDEN, True, 4)
    assert described["steps"][0]["entropy_low"] > 0
    assert re.search(r'data-plot="/steps"[^>]*><svg', page.read_text())
    assert f"| 0 | {described['token_ids'][0]} |" in text.read_text()


def test_the_history_of_the_machine_that_the_bench_names_is_drawn(filled: Path) -> None:
    machine = {"processor": "a processor", "cores": 2, "packages": {"mlx": "0.32.4"}, "size": "quick"}
    figure = {
        "name": "decode/toy/f32/p32", "peer": "mlx-lm", "unit": "tok/s", "engine": 30.5, "peer_value": 10.25,
        "ratio": 3.0, "low": 2.75, "high": 3.25, "engine_range": [30.0, 31.0], "bits_identical": True,
    }  # fmt: skip
    (filled / "bench.json").write_text(json.dumps({"machine": machine, "figures": [figure]}))
    for commit in ("1a2b3c4d5e6f", "2a2b3c4d5e6f"):
        append(history_file(identity(machine), "quick"), figures=[figure], noisy=[], commit=commit)

    assert run() == 0

    rows = json.loads((filled / "report.json").read_text())["history"]
    assert [(row["run"], row["commit"], row["ratio"]) for row in rows] == [
        (1, "1a2b3c4d5e6f", 3.0),
        (2, "2a2b3c4d5e6f", 3.0),
    ]
    assert 'data-plot="/history#0"' in (filled / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "told"),
    [("llama-tiny/f32/fp/forced/*", "'llama-tiny/f32/fp/forced/*' names "), ("gone", "no case matches 'gone'")],
)
def test_a_golden_is_named_alone(name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--golden", name) == 2
    assert capsys.readouterr().err.startswith(told)
