"""`ASSAY_KERNELS` chooses the engine's kernels; what was used, after any fallback, is in the runner's provenance."""

from pathlib import Path

import pytest

from engine.kernels.level import Kernels
from parity.engine_runner import EngineRunner, chosen_kernels
from parity.errors import UsageError


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
