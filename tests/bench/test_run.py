"""A configuration that fails costs itself alone; a run that was broken off goes on where it stopped."""

from pathlib import Path
from typing import Any

import pytest

from bench import run as running
from bench.interleave import Figure
from bench.run import run_table
from bench.suite import Configuration, Size, figure
from parity.errors import AssayError

SIZE = Size(
    name="toy",
    configurations=(Configuration(snapshot="a", dtype="f32"), Configuration(snapshot="b", dtype="f32")),
    prompts=(8,),
    repeats=1,
    one_thread=(),
    startup=True,
)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was measured, in order; nothing is really run."""
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))
    monkeypatch.setattr(running, "current_commit", lambda: "abcdef012345")
    names: list[str] = []

    def measure(configuration: Configuration, *_: Any) -> list[Figure]:
        names.append(configuration.where)
        return [figure(f"load/{configuration.where}", "s", "mlx-lm", [1.0], [2.0], bits=None, note="")]

    monkeypatch.setattr(running, "_configuration", measure)
    monkeypatch.setattr(running, "_startup", lambda c, _: measure(c)[:0] or names.append("startup") or [])
    return names


def failing(monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException) -> None:
    right = running._configuration

    def measure(configuration: Configuration, *rest: Any) -> list[Figure]:
        if configuration.where == where:
            raise error
        return right(configuration, *rest)

    monkeypatch.setattr(running, "_configuration", measure)


def names_of(result: dict[str, Any]) -> list[str]:
    return [found["name"] for found in result["figures"]]


def test_every_part_is_measured_and_the_machine_described(measured: list[str]) -> None:
    result = run_table(SIZE, [], on_progress=lambda _: None)
    assert measured == ["a/f32", "startup", "a/f32", "b/f32"]
    assert names_of(result) == ["load/a/f32", "load/b/f32"]
    assert result["failures"] == {}
    machine = result["machine"]
    assert machine.keys() >= {
        "identity",
        "packages",
        "peers",
        "kernels",
        "threads",
        "preflight",
        "noisy",
        "peer_switches",
    }
    assert (machine["size"], machine["peers"]["mlx-lm"], machine["mlx-lm"]) == ("toy", "0.32.2", "0.32.2")


@pytest.mark.usefixtures("measured")
def test_a_failure_costs_its_configuration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "a/f32", AssayError("the engine worker died", exit_code=-9, next_step="run it again"))
    told: list[str] = []
    result = run_table(SIZE, [], on_progress=told.append)
    assert names_of(result) == ["load/b/f32"]
    assert result["failures"] == {"a/f32": "the engine worker died exit code -9 next run it again"}
    assert told[-1].splitlines()[:2] == ["not measured: a/f32", "the engine worker died"]


def test_a_run_that_was_broken_off_goes_on(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as once:
        failing(once, "b/f32", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_table(SIZE, [], on_progress=lambda _: None)
    measured.clear()
    told: list[str] = []
    result = run_table(SIZE, [], on_progress=told.append)
    assert measured == ["b/f32"]
    assert names_of(result) == ["load/a/f32", "load/b/f32"]
    assert told[0] == "going on with a run that was broken off: startup, a/f32 measured before"
    measured.clear()
    run_table(SIZE, [], on_progress=lambda _: None)
    assert measured[-2:] == ["a/f32", "b/f32"], "a run that has ended leaves nothing to go on with"


def test_another_commit_begins_anew(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as once:
        failing(once, "b/f32", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_table(SIZE, [], on_progress=lambda _: None)
    measured.clear()
    monkeypatch.setattr(running, "current_commit", lambda: "abcdef012345+")
    run_table(SIZE, [], on_progress=lambda _: None)
    assert measured == ["a/f32", "startup", "a/f32", "b/f32"]
