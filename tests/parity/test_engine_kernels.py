"""`ASSAY_KERNELS` chooses the engine's kernels; what was used, after any fallback, is in the runner's provenance."""

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

from engine.kernels.level import LEVELS, Kernels
from parity.engine_runner import EngineRunner, chosen_kernels
from parity.errors import UsageError
from parity.gate import check
from parity.matrix import load_cases, select
from parity.models.fetch import ensure_snapshot


def test_the_fused_step_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_KERNELS", raising=False)
    kernels = EngineRunner().kernels
    assert kernels is not None
    assert kernels.level == LEVELS[-1] == "fused"


@pytest.mark.parametrize("level", LEVELS)
def test_a_lower_level_can_be_asked_for(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_KERNELS", level)
    kernels = chosen_kernels()
    assert kernels is not None
    assert kernels.level == level


def test_plain_forces_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_KERNELS", "plain")
    assert chosen_kernels() is None
    assert EngineRunner().kernels is None
    assert EngineRunner().provenance().switches["ASSAY_KERNELS"] == "plain"


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_KERNELS", "turbo")
    with pytest.raises(UsageError) as caught:
        EngineRunner()
    assert str(caught.value).splitlines() == [
        "ASSAY_KERNELS names no level of kernels",
        "  found  turbo",
        f"  known  {', '.join(('plain', *LEVELS))}",
        "  next   unset ASSAY_KERNELS, or set it to one of these",
    ]


@pytest.fixture
def _no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engine.kernels.level", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoNumba(), *sys.meta_path])
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "numba" or name.startswith("engine.kernels.")
    ]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("_no_numba")
def test_a_missing_compiler_is_named_where_kernels_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_KERNELS", "linear")
    with pytest.raises(UsageError) as caught:
        EngineRunner()
    assert str(caught.value).splitlines() == [
        "ASSAY_KERNELS=linear needs a package that is not installed",
        "  missing  numba",
        "  next     make setup, or unset ASSAY_KERNELS",
    ]


@pytest.mark.usefixtures("_no_numba")
def test_without_a_compiler_operations_are_plain_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_KERNELS", raising=False)
    said: list[str] = []
    assert chosen_kernels(said.append) is None
    assert [message.splitlines() for message in said] == [
        [
            "kernels need a package that is not installed",
            "  missing  numba",
            "  instead  plain mlx operations",
            "  next     make setup, or ASSAY_KERNELS=plain",
        ]
    ]


class NoNumba(MetaPathFinder):
    """An installation without Numba."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "numba":
            raise ModuleNotFoundError("No module named 'numba'", name="numba")


def test_the_kernels_are_kept_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))
    monkeypatch.setenv("ASSAY_KERNELS", "linear")
    kernels = EngineRunner().kernels
    assert kernels is not None
    assert kernels.folder == tmp_path / "kernels"


def test_the_provenance_tells_what_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))
    monkeypatch.setenv("ASSAY_KERNELS", "linear")
    runner = EngineRunner()
    assert runner.provenance().switches["ASSAY_KERNELS"] == "linear"
    assert isinstance(runner.kernels, Kernels)
    runner.kernels.refusal = "kernel dense-f32 does not give mlx's bits here"
    assert runner.provenance().switches["ASSAY_KERNELS"] == "plain (kernel dense-f32 does not give mlx's bits here)"
    runner.kernels.say("a message")
    assert capsys.readouterr().err == "a message\n"


@pytest.mark.parametrize("name", ["llama-tiny/f32/fp/greedy/*-tail-split", "llama-tiny/bf16/fp/greedy/*-tail-split"])
def test_a_case_gives_the_same_trace_on_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = select(load_cases(), name)[0]
    snapshot = ensure_snapshot(case.snapshot)
    expected = EngineRunner(kernels=None).run(case, snapshot)
    monkeypatch.setenv("ASSAY_KERNELS", "linear")
    runner = EngineRunner()
    actual = runner.run(case, snapshot)
    assert runner.provenance().switches["ASSAY_KERNELS"] == "linear"
    assert {name: t.digest for name, t in expected.tensors.items()} == {n: t.digest for n, t in actual.tensors.items()}
    assert len(expected.tensors) > case.num_steps


def test_a_refusal_is_in_the_provenance_of_its_verdict_and_said_once(tmp_path: Path) -> None:
    case = select(load_cases(), "llama-tiny/f32/fp/greedy/p40-tail-split")[0]
    snapshot, said = ensure_snapshot(case.snapshot), list[str]()

    def broken(_form: object, _folder: Path) -> Any:
        raise OSError("the disk is full")

    runner = EngineRunner(kernels=Kernels(folder=tmp_path, say=said.append, compile=broken))
    used_before = runner.provenance().switches["ASSAY_KERNELS"]
    (verdict,) = check(
        (case,), lambda: runner, find_snapshot=lambda _: snapshot, every_name={case.name}, pattern=case.name
    )
    assert used_before == LEVELS[-1]
    assert verdict.status.value == "IDENTICAL", verdict.message()
    assert verdict.judged is not None
    assert verdict.judged.switches["ASSAY_KERNELS"].startswith("plain (kernel ")
    assert [message.splitlines()[1] for message in said] == ["  reason   the disk is full"]
