"""`ASSAY_KERNELS` chooses the engine's kernels; what was used, after any fallback, is in the runner's provenance."""

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

from engine.kernels.level import Kernels
from parity.engine_runner import EngineRunner, chosen_kernels
from parity.errors import UsageError
from parity.matrix import load_cases, select
from parity.models.fetch import ensure_snapshot


@pytest.mark.parametrize("value", [None, "plain"])
def test_plain_operations_are_the_default(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_KERNELS", raising=False)
    if value is not None:
        monkeypatch.setenv("ASSAY_KERNELS", value)
    assert chosen_kernels() is None
    assert EngineRunner().kernels is None


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_KERNELS", "turbo")
    with pytest.raises(UsageError) as caught:
        EngineRunner()
    assert str(caught.value).splitlines() == [
        "ASSAY_KERNELS names no level of kernels",
        "  found  turbo",
        "  known  plain, linear",
        "  next   unset ASSAY_KERNELS, or set it to one of these",
    ]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_KERNELS", "linear")
    monkeypatch.delitem(sys.modules, "engine.kernels.level", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoNumba(), *sys.meta_path])
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "numba" or name.startswith("engine.kernels.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError) as caught:
        EngineRunner()
    assert str(caught.value).splitlines() == [
        "ASSAY_KERNELS=linear needs a package that is not installed",
        "  missing  numba",
        "  next     make setup, or unset ASSAY_KERNELS",
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
    monkeypatch.delenv("ASSAY_KERNELS", raising=False)
    expected = EngineRunner().run(case, snapshot)
    monkeypatch.setenv("ASSAY_KERNELS", "linear")
    runner = EngineRunner()
    actual = runner.run(case, snapshot)
    assert runner.provenance().switches["ASSAY_KERNELS"] == "linear"
    assert {name: t.digest for name, t in expected.tensors.items()} == {n: t.digest for n, t in actual.tensors.items()}
    assert len(expected.tensors) > case.num_steps
