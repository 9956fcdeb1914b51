"""The mlx-optiq process says which patches it carries, and refuses to say so when that is not what happened."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oracles.mlx_optiq import patches
from oracles.mlx_optiq.patches import HOME, check_registered, check_untouched, use_empty_home


def test_its_home_is_an_empty_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environ: dict[str, str] = {"PATH": "/bin"}
    use_empty_home(environ)
    assert Path(environ[HOME]).parent == tmp_path
    assert list(Path(environ[HOME]).iterdir()) == []


def test_a_setting_of_mlx_optiq_is_refused_and_named() -> None:
    with pytest.raises(RuntimeError, match="settings of mlx-optiq are set: OPTIQ_HOME, OPTIQ_PREFILL_STEP"):
        use_empty_home({"OPTIQ_PREFILL_STEP": "7", "OPTIQ_HOME": "there", "PATH": "/bin"})


def test_a_process_that_loaded_it_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optiq", SimpleNamespace())
    with pytest.raises(RuntimeError, match="loaded already"):
        patches.install()


def test_a_registration_that_failed_in_silence_is_refused() -> None:
    check_registered(SimpleNamespace(_REGISTERED=True))
    with pytest.raises(RuntimeError, match="did not register its models"):
        check_registered(SimpleNamespace(_REGISTERED=False))


def test_a_replaced_drawing_function_is_refused_and_named() -> None:
    before = {"mlx_lm.sample_utils.apply_top_k": len, "mlx.core.log": abs}
    check_untouched(before, dict(before))
    with pytest.raises(RuntimeError, match=r"importing mlx-optiq replaced mlx_lm\.sample_utils\.apply_top_k$"):
        check_untouched(before, {**before, "mlx_lm.sample_utils.apply_top_k": max})
