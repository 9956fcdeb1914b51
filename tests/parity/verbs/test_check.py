import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from parity import gate
from parity.case import Case
from parity.cli import main
from parity.golden import Golden
from parity.matrix import Place
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import Trace
from parity.verbs import check

PLATFORM = "linux-x86_64-cpu"
NAMES = ("toy/f32/fp/greedy/p1-whole", "toy/f32/fp/greedy/p2-whole")
KEYS = {
    "case", "status", "model_type", "kv", "sampler", "dtype", "tier", "oracle", "num_steps", "first_step", "earliest", "cause",
}  # fmt: skip


class FakeEngine:
    """Answers from a table."""

    name = "fake"

    def __init__(self, traces: dict[str, Trace], provenance: Provenance) -> None:
        self.traces = traces
        self._provenance = provenance

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        del snapshot
        return self.traces[case.name]

    def provenance(self) -> Provenance:
        return self._provenance


@pytest.fixture
def traces(  # noqa: PLR0917 - fixtures
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
    make_provenance: Callable[..., Provenance],
    saved: Callable[[Golden], Path],
    goldens: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Trace]:
    """What the engine will answer; a test may change it. Goldens of both cases are on disk."""
    cases = [make_case(name) for name in NAMES]
    made = {case.name: make_trace(case) for case in cases}
    for case in cases:
        saved(make_golden(case, made[case.name], make_snapshot()))
    engine = FakeEngine(made, make_provenance())
    placed = tuple((case, Place(file="toy.toml", line=7)) for case in cases)
    monkeypatch.setattr(check, "placed_cases", lambda: placed)
    monkeypatch.setattr(check, "EngineRunners", lambda _: lambda: engine)
    monkeypatch.setattr(check, "find_snapshot", make_snapshot)
    monkeypatch.setattr(check, "check", partial(gate.check, root=goldens, platform=PLATFORM))
    return made


@pytest.fixture
def wrong(traces: dict[str, Trace], flip: Callable[..., Tensor]) -> None:
    """One bit of one logit of the second case is off."""
    trace = traces[NAMES[1]]
    traces[NAMES[1]] = replace(trace, tensors={**trace.tensors, "logits/1": flip(trace.tensors["logits/1"], 4)})


def run(*line: str) -> int:
    return main(["check", "--jobs", "1", *line])


@pytest.mark.usefixtures("traces")
def test_a_right_engine_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0

    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "2 cases: 2 IDENTICAL"
    assert told.err.splitlines() == [f"1 of 2  IDENTICAL  {NAMES[0]}", f"2 of 2  IDENTICAL  {NAMES[1]}"]


@pytest.mark.usefixtures("wrong")
def test_a_wrong_engine_exits_with_1_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 1

    out = capsys.readouterr().out
    assert f"DIFFERENT  logits of {NAMES[1]} are not bit-identical to mlx-lm 0.32.2" in out
    assert out.splitlines()[-1] == "2 cases: 1 IDENTICAL, 1 DIFFERENT"


@pytest.mark.usefixtures("wrong")
def test_json_has_exactly_the_promised_keys_and_nothing_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 1

    described = json.loads(capsys.readouterr().out)
    assert set(described) == {"counts", "cases"}
    assert described["counts"] == {"IDENTICAL": 1, "DIFFERENT": 1}
    assert [set(row) for row in described["cases"]] == [KEYS, KEYS]
    assert [(row["case"], row["status"], row["first_step"]) for row in described["cases"]] == [
        (NAMES[0], "IDENTICAL", None),
        (NAMES[1], "DIFFERENT", 1),
    ]


@pytest.mark.usefixtures("wrong")
def test_a_pattern_narrows_the_gate() -> None:
    assert run("*/p1-*") == 0
    assert run(NAMES[1]) == 1


@pytest.mark.usefixtures("traces")
def test_an_empty_selection_is_no_green_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nothing/*") == 2

    assert capsys.readouterr().err.startswith("no case matches 'nothing/*'")


@pytest.mark.usefixtures("traces")
def test_a_platform_without_goldens_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "check", partial(gate.check, root=tmp_path / "none", platform=PLATFORM))

    assert run() == 2
    assert "make parity, which records them first, or assay record" in capsys.readouterr().err


@pytest.mark.usefixtures("wrong")
def test_junit_is_written_and_the_folder_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--junit", str(tmp_path / "report.xml")) == 1
    assert ET.parse(tmp_path / "report.xml").getroot().get("failures") == "1"  # noqa: S314 - our own output

    capsys.readouterr()
    assert run("--junit", str(tmp_path / "gone" / "report.xml")) == 2
    assert run("--junit", str(tmp_path)) == 2
    assert "the JUnit report cannot be written" in capsys.readouterr().err


@pytest.mark.usefixtures("wrong")
def test_github_annotations_point_at_the_matrix_and_stay_out_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    told = f"::error file=parity/cases/toy.toml,line=7,title=DIFFERENT {NAMES[1]}::logits of"
    assert run("--github") == 1
    assert told in capsys.readouterr().out

    assert run("--github", "--json") == 1
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert told in captured.err


def test_traces_are_kept_for_diff(traces: dict[str, Trace], tmp_path: Path) -> None:
    assert run("--traces", str(tmp_path / "t")) == 0

    assert Trace.load(tmp_path / "t" / NAMES[0]) == traces[NAMES[0]]


def test_the_engine_is_the_default_runner(tmp_path: Path) -> None:
    assert check.EngineRunners(tmp_path)().name == "engine"
    assert check.EngineRunners(tmp_path) == check.EngineRunners(
        tmp_path
    )  # a worker keeps one runner for equal factories


def test_how_many_verdicts_came_from_which_kernels_is_told(
    traces: dict[str, Trace], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del traces  # they are in place
    judge = gate.check_one
    levels = ["plain (kernel x does not give mlx's bits here)", "fused"]

    def told(task: Any, factory: Any) -> Any:
        verdict = judge(task, factory)
        used = replace(verdict.judged, switches={"ASSAY_KERNELS": levels.pop()})
        return replace(verdict, judged=used)

    monkeypatch.setattr(gate, "check_one", told)
    assert run() == 0
    assert "kernels: 1 fused, 1 plain (kernel x does not give mlx's bits here)\n" in capsys.readouterr().out


@pytest.fixture
def opt_in_case(traces: dict[str, Trace], make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> str:
    """A third case, of a snapshot with terms of use; it has no golden and the engine no answer."""
    del traces  # they are in place
    case = make_case("gemma3-270m/f32/fp/greedy/p1-whole", snapshot="gemma3-270m")
    placed = (*check.placed_cases(), (case, Place(file="toy.toml", line=9)))
    monkeypatch.setattr(check, "placed_cases", lambda: placed)
    return case.name


LEFT_OUT = "left out: 1 case of gemma3-270m (opt-in: 'gemma3-270m/*' chooses them)"


def test_opt_in_cases_are_left_out_and_that_is_said(opt_in_case: str, capsys: pytest.CaptureFixture[str]) -> None:
    del opt_in_case  # it is in place
    assert run() == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["2 cases: 2 IDENTICAL", LEFT_OUT]


def test_as_json_it_is_said_on_standard_error(opt_in_case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    out, err = capsys.readouterr()
    assert opt_in_case not in {row["case"] for row in json.loads(out)["cases"]}
    assert LEFT_OUT in err.splitlines()


def test_an_opt_in_case_that_is_named_is_judged_like_any_other(
    opt_in_case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("gemma3-270m/*") == 1
    assert f"MISSING_GOLDEN  no golden of {opt_in_case}" in capsys.readouterr().out


@pytest.mark.usefixtures("wrong")
def test_a_job_s_summary_is_added_where_github_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))

    assert run() == 1
    assert summary.read_text() == "before\n", "only --github writes it"
    assert run("--github") == 1
    assert summary.read_text().startswith("before\n## ✗ assay check: 2 cases: 1 IDENTICAL, 1 DIFFERENT\n")


@pytest.mark.usefixtures("wrong")
def test_what_was_found_is_left_on_disk_for_the_report(results_folder: Path, tmp_path: Path) -> None:
    assert run("*/p2-*") == 1
    left = json.loads((results_folder / "check.json").read_text())
    assert (left["pattern"], left["counts"]) == ("*/p2-*", {"DIFFERENT": 1})
    assert left["cases"][0]["place"] == {"file": "parity/cases/toy.toml", "line": 7}

    assert run("--results", str(tmp_path / "mine")) == 1
    assert json.loads((tmp_path / "mine" / "check.json").read_text())["counts"] == {"IDENTICAL": 1, "DIFFERENT": 1}


def test_traces_of_another_engine_are_judged_by_the_same_gate(
    traces: dict[str, Trace],
    make_provenance: Callable[..., Provenance],
    flip: Callable[..., Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, trace in traces.items():
        trace.save(tmp_path / "theirs" / name)
    ground = make_provenance().to_json()
    said = {"platform": ground["platform"], "device": ground["device"], "packages": ground["packages"]}
    (tmp_path / "theirs" / "provenance.json").write_text(json.dumps(said))

    assert run("--from", str(tmp_path / "theirs")) == 0
    assert "2 cases: 2 IDENTICAL" in capsys.readouterr().out

    wrong = replace(
        traces[NAMES[0]], tensors={**traces[NAMES[0]].tensors, "logits/0": flip(traces[NAMES[0]].logits(0))}
    )
    wrong.save(tmp_path / "theirs" / NAMES[0])
    (tmp_path / "theirs" / NAMES[1] / "trace.json").unlink()
    assert run("--from", str(tmp_path / "theirs")) == 1
    out = capsys.readouterr().out
    assert "2 cases: 1 DIFFERENT, 1 ERROR" in out
    assert f"there is no trace of {NAMES[1]}" in out

    (tmp_path / "theirs" / "provenance.json").unlink()
    assert run("--from", str(tmp_path / "theirs")) == 2
    assert capsys.readouterr().err.startswith("the traces do not say what they rest on: provenance.json")
