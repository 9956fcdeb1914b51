"""`assay bench --full`, `--quick`, `--gate`, `--compare`, `--against`: what is refused, kept, written, and how they exit."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import history
from bench.preflight import Condition
from parity import cli
from parity.verbs import bench_table

QUIET = [Condition(name="load", found="0.10 a core", wanted="at most 0.5 a core", holds=True)]
NOISY = [Condition(name="load", found="3.00 a core", wanted="at most 0.5 a core", holds=False)]


def figure(ratio: float = 2.0, *, bits: bool | None = True) -> dict[str, Any]:
    return {
        "name": "decode/s/f32/p32",
        "peer": "mlx-lm",
        "unit": "tok/s",
        "engine": 4.0,
        "peer_value": 2.0,
        "ratio": ratio,
        "low": ratio * 0.95,
        "high": ratio * 1.05,
        "engine_range": [3.9, 4.1],
        "peer_range": [2.0, 2.0],
        "bits_identical": bits,
        "note": "",
    }


class Table:
    """What the next run measures."""

    def __init__(self) -> None:
        self.figures = [figure()]
        self.failures: dict[str, str] = {}
        self.runs: list[str] = []
        self.snapshots: list[str] = []

    def run(self, size: Any, conditions: list[Condition], **_: Any) -> dict[str, Any]:
        self.runs.append(size.name)
        self.snapshots = [c.snapshot for c in size.configurations]
        described = bench_table.described()
        noisy = [c.name for c in conditions if not c.holds]
        return {"machine": {**described, "noisy": noisy}, "figures": self.figures, "failures": self.failures}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """Nothing is really measured; ASSAY_HOME and the working folder are empty ones."""
    made = Table()
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_table, "run_table", made.run)
    monkeypatch.setattr(bench_table, "preflight", lambda: QUIET)
    monkeypatch.setattr(history, "current_commit", lambda: "abcdef012345")
    return made


def test_a_full_table_is_written_kept_and_printed(
    table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--full"]) == 0
    assert table.runs == ["full"]
    written = json.loads((tmp_path / "reports" / "bench.json").read_text())
    assert written["figures"] == [figure()]
    assert "| s/f32/p32 | 4 | mlx-lm | 2 | tok/s | 2 |" in (tmp_path / "reports" / "bench.md").read_text()
    out = capsys.readouterr().out
    assert "decode/s/f32/p32  4       mlx-lm  2          tok/s  2      1.9-2.1  identical\n" in out
    assert out.endswith("kept as run 1 (abcdef012345) of this machine, for --compare and --against\n")


def test_a_snapshot_with_terms_of_use_is_measured_where_it_is_named(
    table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--full"]) == 0
    assert "gemma3-270m" not in table.snapshots
    assert cli.main(["bench", "--full", "gemma3-270m"]) == 0
    assert table.snapshots[-2:] == ["gemma3-270m", "gemma3-270m"]
    assert cli.main(["bench", "--full", "smollm2-135m"]) == 2
    assert capsys.readouterr().err == (
        "a full table has its own snapshots; names only add those that have terms of use\n"
        "  given  smollm2-135m\n  known  gemma3-270m\n  next   assay bench --full gemma3-270m\n"
    )


def test_a_quick_table_leaves_the_pages_alone(table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--quick", "--json", "--output", str(tmp_path / "q.json")]) == 0
    assert table.runs == ["quick"]
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "q.json").read_text())
    assert not (tmp_path / "reports").exists()


def test_headline_figures_are_refused_on_a_noisy_machine(
    table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_table, "preflight", lambda: NOISY)
    assert cli.main(["bench", "--full"]) == 2
    assert capsys.readouterr().err == (
        "this machine is too noisy for headline figures\n"
        "  found  load: 3.00 a core, wanted at most 0.5 a core\n"
        "  next   wait until it is quiet, or measure anyway and have the result marked: assay bench --full --noisy\n"
    )
    assert table.runs == []


@pytest.mark.parametrize("arguments", [["--full", "--noisy"], ["--quick"]])
def test_where_a_noisy_machine_is_measured_the_result_is_marked(
    arguments: list[str], table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_table, "preflight", lambda: NOISY)
    assert cli.main(["bench", *arguments]) == 0
    assert "noisy  load: 3.00 a core, wanted at most 0.5 a core\n" in capsys.readouterr().out
    assert table.runs == [arguments[0].removeprefix("--")]
    file = history.history_file(history.identity(bench_table.described()), table.runs[0])
    assert history.load(file)[0].noisy == ("load: 3.00 a core, wanted at most 0.5 a core",)


def test_other_bits_and_failures_fail(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    table.figures = [figure(bits=False)]
    assert cli.main(["bench", "--quick"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    table.figures, table.failures = [figure()], {"t/f32": "it died"}
    assert cli.main(["bench", "--quick"]) == 1
    assert "not measured: t/f32: it died\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["--full", "--quick"], "--full --quick"),
        (["--full", "--gate"], "--full --gate"),
        (["smollm2-135m", "--quick"], "--quick smollm2-135m"),
        (["--quick", "--dtype", "bf16"], "--quick --dtype"),
        (["--gate", "x", "--samplers"], "--gate --samplers"),
    ],
)
def test_ways_that_do_not_go_together_are_refused(
    arguments: list[str], given: str, table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == (
        f"these ways to bench do not go together\n  given  {given}\n  next   assay bench {given.split(maxsplit=1)[0]}\n"
    )
    assert table.runs == []


def test_the_gate_is_compared(
    table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del table
    asked: list[tuple[str | None, int]] = []

    def measure(pattern: str | None, *, repeats: int, **_: Any) -> list[Any]:
        asked.append((pattern, repeats))
        from bench.suite import figure as made  # noqa: PLC0415

        return [made("gate/wall", "1/s", "plain", [0.5], [0.125], bits=len(asked) == 1, note="")]

    monkeypatch.setattr(bench_table, "measure_gate", measure)
    assert cli.main(["bench", "--gate", "llama-tiny/*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"][0]["ratio"] == 4.0
    assert cli.main(["bench", "--gate", "--repeats", "3"]) == 1
    assert asked == [("llama-tiny/*", 1), (None, 3)]


def test_two_runs_are_compared_and_a_loss_beyond_noise_fails(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    for ratio in (2.0, 2.02, 1.0):
        table.figures = [figure(ratio)]
        assert cli.main(["bench", "--full"]) == 0
    capsys.readouterr()
    assert cli.main(["bench", "--compare", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run 2 (abcdef012345) against run 1 (abcdef012345)\n")
    assert "decode/s/f32/p32  mlx-lm  2       2.02   1.010   0.914-1.116  within noise\n" in out
    assert cli.main(["bench", "--compare", "1", "last"]) == 1
    assert "slower" in capsys.readouterr().out
    assert cli.main(["bench", "--compare", "last", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"][0]["word"] == "faster"


def test_the_last_run_is_held_against_main(
    table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(history, "is_on_main", lambda commit: commit == "aaaaaaaaaaaa")
    monkeypatch.setattr(history, "current_commit", lambda: "aaaaaaaaaaaa")
    cli.main(["bench", "--quick"])
    monkeypatch.setattr(history, "current_commit", lambda: "bbbbbbbbbbbb+")
    table.figures = [figure(1.0)]
    cli.main(["bench", "--quick"])
    capsys.readouterr()
    assert cli.main(["bench", "--against", "main", "--quick"]) == 1
    assert capsys.readouterr().out.startswith("run 2 (bbbbbbbbbbbb+) against run 1 (aaaaaaaaaaaa)\n")
    assert cli.main(["bench", "--against", "main"]) == 2
    assert "has no run 'main'" in capsys.readouterr().err
