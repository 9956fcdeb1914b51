"""What mlx-optiq changes in mlx-lm in this process, said and checked; one patch set a process.

The first patch is `import optiq`: importing any part of mlx-optiq registers its models and rebinds parts of mlx-lm, and cannot
be undone. What draws tokens is not among what it rebinds. A KV mode adds patches of its own, in this order:

    rings that can be packed       for packed keys and values in every cache of the same width
    conversion one layer at a time likewise, but for `from-empty`, where mlx-lm's own conversion packs the empty caches
    widths by layer                for `config`; brings the rings with it
    tiled attention                for `tiledN`, always last: before the others it is wrapped and fails on grouped heads
    tiles lifted to float32        for `lifted`: no release does this, so it is named as ours

Guarantees: `install` refuses a process in which mlx-optiq's own settings are set, mlx-optiq is loaded already, its registration
failed (it swallows the reason), a function that draws was replaced, or a patch left no mark. mlx-optiq's home is an empty
folder. What is installed is exactly what the returned words say.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from parity.kv import KV

HOME: Final = "OPTIQ_HOME"
IMPORT: Final = "import optiq"
RINGS: Final = "runtime.kv.patch_rotating_to_quantized()"
STREAMING: Final = "runtime.streaming_kv_quant.install()"
LIFTED: Final = "runtime.fused_quant_sdpa admits float32 (ours, in no release)"
DRAWS: Final = {  # module to the names in it that a draw goes through
    "mlx.core": ("argmax", "softmax", "log"),
    "mlx.core.random": ("categorical", "seed", "split", "uniform"),
    "mlx_lm.sample_utils": ("apply_top_k", "apply_top_p", "apply_min_p", "categorical_sampling"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What a process carries.

    Attributes:
        patches: In order, for the provenance.
        tiles_run: How often tiled attention has run since the process began; always 0 where it is not installed.
    """

    patches: tuple[str, ...]
    tiles_run: Callable[[], int]


def patch_set(kv: KV) -> tuple[str, ...]:
    """The patches that a KV mode needs, in the order of installation."""
    patches = [IMPORT]
    if kv.layers:
        widths = ", ".join(f"({w.cache}, {w.bits}, {w.group_size})" for w in kv.layers)
        patches.append(f"serve.install_mixed_kv([{widths}])")
    elif kv.packs:
        patches += [RINGS] if kv.order == "from-empty" else [RINGS, STREAMING]
    if kv.tile is not None:
        patches.append(f"runtime.fused_quant_sdpa.install(n_chunk={kv.tile})")
    return (*patches, LIFTED) if kv.lifted else tuple(patches)


def install(kv: KV | None = None) -> Installed:
    """Import mlx-optiq in a home of its own, and install what a KV mode needs.

    Args:
        kv: The mode; nothing but the import without one.

    Raises:
        RuntimeError: The process is not clean, or afterwards not what the patch set says.
    """
    kv = kv or KV()
    if "optiq" in sys.modules:
        raise RuntimeError("mlx-optiq is loaded already: what it has patched is unknown")
    use_empty_home(os.environ)
    before = drawing_functions()
    importlib.import_module("optiq")
    check_registered(importlib.import_module("optiq.mlx_lm_patches._register"))
    check_untouched(before, drawing_functions())
    if kv.layers:
        _install_widths_by_layer(kv)
    elif kv.packs:
        _install_rings(streaming=kv.order != "from-empty")
    tiles_run = (lambda: 0) if kv.tile is None else _install_tiles(kv.tile, lifted=kv.lifted)
    return Installed(patches=patch_set(kv), tiles_run=tiles_run)


def use_empty_home(environ: "os._Environ[str] | dict[str, str]") -> None:
    """Point mlx-optiq at a new folder, where it finds no configuration.

    Raises:
        RuntimeError: Other settings of mlx-optiq are set.
    """
    if found := sorted(name for name in environ if name.startswith("OPTIQ_")):
        raise RuntimeError(f"settings of mlx-optiq are set: {', '.join(found)}")
    environ[HOME] = str(Path(mkdtemp(prefix="optiq-")))  # in the private folder that TMPDIR names; removed with it


def drawing_functions() -> dict[str, Any]:
    """What draws tokens now, by name."""
    modules = {name: importlib.import_module(name) for name in DRAWS}
    return {f"{name}.{each}": getattr(modules[name], each) for name, names in DRAWS.items() for each in names}


def check_registered(register: Any) -> None:  # noqa: ANN401 - a module of mlx-optiq
    """Refuse a registration that did not reach its end.

    Raises:
        RuntimeError: It did not.
    """
    if register._REGISTERED is not True:  # noqa: SLF001 - the only sign that it gives
        raise RuntimeError("mlx-optiq did not register its models: the patch set is not what the provenance would say")


def check_untouched(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse draws that go through other functions than mlx's and mlx-lm's.

    Raises:
        RuntimeError: Some do.
    """
    if replaced := [name for name, function in before.items() if after[name] is not function]:
        raise RuntimeError(f"importing mlx-optiq replaced {', '.join(replaced)}")


def check_bound(patch: str, name: str, expected: str) -> None:
    """Refuse a patch that did not bind its function where mlx-lm looks it up.

    Args:
        patch: Its words.
        name: Module and attribute that it rebinds.
        expected: Name of the function that must stand there.

    Raises:
        RuntimeError: Another one does.
    """
    module, attribute = name.rsplit(".", 1)
    bound = getattr(importlib.import_module(module), attribute)
    if bound.__name__ != expected:
        raise RuntimeError(f"{patch} left no mark: {name} is {bound.__name__}, not {expected}")


def _install_rings(*, streaming: bool) -> None:
    importlib.import_module("optiq.runtime.kv").patch_rotating_to_quantized()
    check_bound(RINGS, "mlx_lm.models.base.scaled_dot_product_attention", "_patched_sdpa")
    if streaming:
        importlib.import_module("optiq.runtime.streaming_kv_quant").install()
        check_bound(STREAMING, "mlx_lm.generate.maybe_quantize_kv_cache", "streaming_maybe_quantize_kv_cache")


def _install_widths_by_layer(kv: KV) -> None:
    serve = importlib.import_module("optiq.serve")
    widths = [
        serve._LayerQuantConfig(layer_idx=w.cache, bits=w.bits, group_size=w.group_size)  # noqa: SLF001 - no public way
        for w in kv.layers
    ]
    serve.install_mixed_kv(widths, quantized_kv_start=kv.start)
    patch = patch_set(kv)[1]
    check_bound(patch, "mlx_lm.generate.maybe_quantize_kv_cache", "patched_maybe_quantize")
    check_bound(patch, "mlx_lm.models.base.scaled_dot_product_attention", "_patched_sdpa")


def _install_tiles(size: int, *, lifted: bool) -> Callable[[], int]:
    """Install tiled attention; gives what counts its runs, for it falls back without a word."""
    fused: Any = importlib.import_module("optiq.runtime.fused_quant_sdpa")
    fused.install(n_chunk=size)
    bound = "mlx_lm.models.base.quantized_scaled_dot_product_attention"
    check_bound("runtime.fused_quant_sdpa.install", bound, "fused_quantized_scaled_dot_product_attention")
    tiled, runs = fused._prefill_flashattn_n_tiled, []  # noqa: SLF001 - what is counted

    def counted(*args: Any) -> Any:  # noqa: ANN401 - arrays of mlx, which is not here
        runs.append(size)
        return tiled(*args)

    fused._prefill_flashattn_n_tiled = counted  # noqa: SLF001 - likewise
    if lifted:
        shipped, float32 = fused._supported, importlib.import_module("mlx.core").float32  # noqa: SLF001 - the gate

        def admits(queries: Any, q_keys: Any, group_size: int, bits: int) -> bool:  # noqa: ANN401 - arrays of mlx
            as_shipped = queries.astype(importlib.import_module("mlx.core").float16)
            return bool(shipped(as_shipped if queries.dtype == float32 else queries, q_keys, group_size, bits))

        fused._supported = admits  # noqa: SLF001 - likewise
    return lambda: len(runs)
