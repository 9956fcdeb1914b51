"""The mlx-optiq process says which patches it carries, and refuses to say so when that is not what happened."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oracles.mlx_optiq import patches
from oracles.mlx_optiq.patches import (
    HOME,
    check_bound,
    check_registered,
    check_untouched,
    patch_set,
    use_empty_home,
)
from parity.kv import KV


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


RINGS, STREAMING = "runtime.kv.patch_rotating_to_quantized()", "runtime.streaming_kv_quant.install()"
LIFTED = "runtime.fused_quant_sdpa admits float32 (ours, in no release)"


@pytest.mark.parametrize(
    ("word", "patches"),
    [
        ("fp", ()),
        ("max16-k4", ()),
        ("kv8-g64", (RINGS, STREAMING)),
        ("max16-k4-kv4-g32-s16", (RINGS, STREAMING)),
        ("kv8-g64-after-prompt", (RINGS, STREAMING)),
        ("kv8-g64-from-empty", (RINGS,)),
        ("config-8g64_1-4g32_2", ("serve.install_mixed_kv([(1, 8, 64), (2, 4, 32)])",)),
        ("kv8-g64-tiled512", (RINGS, STREAMING, "runtime.fused_quant_sdpa.install(n_chunk=512)")),
        ("kv8-g64-tiled16-lifted", (RINGS, STREAMING, "runtime.fused_quant_sdpa.install(n_chunk=16)", LIFTED)),
        (
            "config-8g64_0-tiled16-lifted",
            ("serve.install_mixed_kv([(0, 8, 64)])", "runtime.fused_quant_sdpa.install(n_chunk=16)", LIFTED),
        ),
    ],
)
def test_a_mode_names_its_patches_in_order_tiles_last(word: str, patches: tuple[str, ...]) -> None:
    assert patch_set(KV.parse(word)) == ("import optiq", *patches)


def test_a_start_changes_no_patch() -> None:
    assert patch_set(KV.parse("config-8g64_1-s16")) == patch_set(KV.parse("config-8g64_1"))


def test_a_patch_that_left_no_mark_is_refused_and_named() -> None:
    check_bound("a patch", "json.dumps", "dumps")
    with pytest.raises(RuntimeError, match=r"^a patch left no mark: json\.dumps is dumps, not patched$"):
        check_bound("a patch", "json.dumps", "patched")
