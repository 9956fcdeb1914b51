"""What mlx-optiq does otherwise than its own documentation or mlx-lm says: one small run a fact.

Runs in mlx-optiq's environment: `python -m oracles.mlx_optiq.facts FOLDER`, FOLDER holding the tiny snapshots. A line of JSON a
fact: `name`, `holds`, `observed`. Importing mlx-optiq cannot be undone and its installations override one another, so their
order here is fixed: what needs nothing installed comes first. What the facts mean is written in `parity/deviations.toml`.
"""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load_model

nn: Any = importlib.import_module("mlx.nn")  # it has no complete types

Observed = tuple[bool, str]
SEED: Final = 7


def ids_of(length: int) -> list[int]:
    """Token ids below 512, the same every time."""
    return [int(i) for i in np.random.PCG64(SEED).random_raw(length) % 512]


def import_replaces_models(_: Path) -> Observed:
    """`import optiq` puts other classes in the place of mlx-lm's own."""
    module = importlib.import_module("mlx_lm.models.laguna")
    before = module.Model
    importlib.import_module("optiq")
    after = importlib.import_module("mlx_lm.models.laguna").Model
    return after is not before, f"mlx_lm.models.laguna.Model is from {before.__module__}, then from {after.__module__}"


def turboquant_stub(_: Path) -> Observed:
    """The module that is named after TurboQuant has none."""
    kind = importlib.import_module("optiq.vlm._mlxvlm.turboquant").TurboQuantKVCache
    try:
        kind(bits=4)
    except RuntimeError as error:
        return True, str(error)
    return False, "a cache is made"


def tiles_not_in_float32(_: Path) -> Observed:
    """Tiled attention is left out in float32 without a word."""
    supported = importlib.import_module("optiq.runtime.fused_quant_sdpa")._supported  # noqa: SLF001 - that is the fact
    answers = {kind: supported(mx.zeros((1,), dtype=kind), None, 64, 8) for kind in (mx.float32, mx.bfloat16)}
    return list(answers.values()) == [False, True], f"float32 {answers[mx.float32]}, bfloat16 {answers[mx.bfloat16]}"


def lora_width_of_three_bits(_: Path) -> Observed:
    """The width of a packed layer is computed by whole elements a word, which 3, 5 and 6 bits do not have."""
    width_of = importlib.import_module("optiq.adapters.mount")._infer_linear_shape  # noqa: SLF001 - that is the fact
    widths = {
        bits: width_of(nn.QuantizedLinear(128, 64, bias=False, group_size=64, bits=bits))[0] for bits in (3, 4, 5, 6, 8)
    }
    wrong = {bits for bits, width in widths.items() if width != 128}
    return wrong == {3, 5, 6}, ", ".join(
        f"{bits} bits: {width}" for bits, width in widths.items()
    ) + " where 128 is right"


def predicate_is_dropped(_: Path) -> Observed:
    """Converting passes the choice of widths by place, where mlx-lm 0.32 has another argument."""
    importlib.import_module("mlx_lm.convert")
    convert: Any = sys.modules["mlx_lm.convert"]  # the package has a function of that name
    given: dict[str, Any] = {}
    right = convert.quantize_model

    def spy(model: Any, config: Any, *places: Any, **more: Any) -> Any:  # noqa: ANN401 - whatever it is given
        names = ("group_size", "bits", "mode", "global_scale", "quant_predicate")
        given.update(dict(zip(names, places, strict=False)), **more)
        return model, config

    def choose(_path: str, _module: Any) -> bool:  # noqa: ANN401 - an mlx-lm module
        return True

    try:
        convert.quantize_model = spy
        with importlib.import_module("optiq.backends.mlx_backend")._requantize_prequantized():  # noqa: SLF001
            convert.quantize_model(nn.Linear(64, 64), {}, 64, 4, quant_predicate=choose)
    finally:
        convert.quantize_model = right
    dropped = given.get("global_scale") is choose and "quant_predicate" not in given
    where = [name for name, value in given.items() if value is choose]
    return dropped, f"the predicate arrives as {', '.join(where) or 'nothing'}"


def delta_capture_eps(_: Path) -> Observed:
    """The capture of delta layers for drafting normalises with another eps than mlx-lm's own layer."""
    import inspect  # noqa: PLC0415 - for this fact alone

    ours = inspect.getsource(importlib.import_module("optiq.runtime.mtp.gdn_capture"))
    theirs = importlib.import_module("mlx_lm.models.gated_delta")
    q = mx.random.normal((1, 1, 1, 48), key=mx.random.key(0)) * 1e-3
    by_capture = 48 ** -(0.5**2) * mx.fast.rms_norm(q, None, 1e-6)
    scaled = 48 ** -(0.5**2) * mx.fast.rms_norm(q, None, 1e-6 / 48)
    apart = float(np.array(mx.abs(by_capture - scaled).max()))
    has = "rms_norm(q, None, 1e-6)" in ours and hasattr(theirs, "normalize_qk")
    return has and apart > 1e-3, f"eps 1e-06 in the capture, 1e-06 / width in mlx-lm: small queries {apart:.2g} apart"


def packed_ring_is_not_reloaded(_: Path) -> Observed:
    """A packed ring that was saved cannot be loaded: mlx-lm looks for its class among its own."""
    kind = importlib.import_module("optiq.runtime.kv.rotating").RotatingQuantizedKVCache
    cache = kind(max_size=16, group_size=64, bits=8)
    keys = mx.random.normal((1, 2, 4, 64))
    cache.update_and_fetch(keys, keys)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "cache.safetensors")
        try:
            save_prompt_cache(file, [cache])
            load_prompt_cache(file)
        except (KeyError, ValueError, AttributeError, RuntimeError) as error:
            return isinstance(error, KeyError), f"{type(error).__name__}: {error}"
    return False, "it is loaded"


def ngram_keeps_rejected(folder: Path) -> Observed:
    """Drafting by n-grams on delta layers, on the CPU: what was rejected stays in the recurrent state."""
    drafting = importlib.import_module("optiq.runtime.ngram_spec").ngram_generate_step
    model, _ = load_model(folder / "qwen3_5-tiny")
    model.set_dtype(mx.float32)

    def greedy(prompt: list[int], steps: int) -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=steps)]

    ids = ids_of(14)
    prompt = ids[:8] + greedy(ids[:8], 6) + ids[8:] + ids[:8]  # its end was seen before, with another continuation
    plain = greedy(prompt, 16)
    wrong = {}
    for name, options in (("default", {}), ("capture_backend=None", {"capture_backend": None})):
        steps = drafting(mx.array(prompt), model, adaptive=False, max_tokens=16, **options)
        wrong[name] = sum(int(step[0]) != token for step, token in zip(steps, plain, strict=True))
    told = ", ".join(f"{name}: {count} of 16 ids differ from greedy decoding" for name, count in wrong.items())
    return wrong["default"] > 0 == wrong["capture_backend=None"], told


def _installed(folder: Path, name: str, layers: Sequence[int], *, kv_bits: int | None) -> list[Any]:
    """Caches after a run in which packing of some layers was installed."""
    serve = importlib.import_module("optiq.serve")
    widths = [serve._LayerQuantConfig(layer_idx=i, bits=8, group_size=64) for i in layers]  # noqa: SLF001
    serve.install_mixed_kv(widths, 0)
    model, _ = load_model(folder / name)
    model.set_dtype(mx.float32)
    caches: list[Any] = make_prompt_cache(model)
    options = {"quantized_kv_start": 0, "kv_bits": kv_bits}
    list(generate_step(mx.array(ids_of(6)), model, max_tokens=2, prompt_cache=caches, **options))
    return caches


def hook_ignores_no_bits(folder: Path) -> Observed:
    """After installation keys and values are packed also where a request asks for none."""
    kinds = [type(cache).__name__ for cache in _installed(folder, "qwen3-tiny", [0], kv_bits=None)]
    packed = [i for i, kind in enumerate(kinds) if "Quantized" in kind]
    return packed == [0], f"kv_bits=None packs caches {packed}"


def nemotron_h_layers_by_slot(folder: Path) -> Observed:
    """A width for a layer is looked up by the place of its cache: where layers own none, by the wrong one."""
    model, _ = load_model(folder / "nemotron_h-tiny")
    attention = [i for i, layer in enumerate(model.layers) if layer.block_type == "*"]
    caches = _installed(folder, "nemotron_h-tiny", attention, kv_bits=8)
    packed = [i for i, cache in enumerate(caches) if "Quantized" in type(cache).__name__]
    return not packed, f"attention is layer {attention}; of {len(caches)} caches {packed or 'none'} are packed"


def gemma3n_packed(folder: Path) -> Observed:
    """Packing gemma3n's shared keys and values fails in the middle of a run."""
    try:
        _installed(folder, "gemma3n-tiny", range(4), kv_bits=8)
    except AttributeError as error:
        return True, f"AttributeError: {error}"
    return False, "nothing is raised"


def tiles_before_widths(_: Path) -> Observed:
    """Tiled attention installed before the widths is wrapped once more: a batch of grouped heads fails; after them it works."""
    tiles, serve = (importlib.import_module(f"optiq.{name}") for name in ("runtime.fused_quant_sdpa", "serve"))
    base: Any = importlib.import_module("mlx_lm.models.base")
    q = mx.random.normal((3, 4, 1, 64)).astype(mx.bfloat16)
    packed = mx.quantize(mx.random.normal((3, 2, 8, 64)).astype(mx.bfloat16), 64, 8)
    mask = mx.ones((3, 1, 1, 8), dtype=mx.bool_)
    said = {}
    for order in ("tiles first", "tiles last"):
        tiles.uninstall()
        if order == "tiles first":
            tiles.install()
        serve.install_mixed_kv([serve._LayerQuantConfig(layer_idx=0, bits=8, group_size=64)], 0)  # noqa: SLF001
        tiles.install()
        try:
            attend = base.quantized_scaled_dot_product_attention
            said[order] = str(list(attend(q, packed, packed, scale=0.125, mask=mask, group_size=64, bits=8).shape))
        except ValueError as error:
            said[order] = f"ValueError: {error}"
    holds = "reshape" in said["tiles first"] and said["tiles last"] == "[3, 4, 1, 64]"
    return holds, "; ".join(f"{order}: {words}" for order, words in said.items())


FACTS: Final[Mapping[str, Callable[[Path], Observed]]] = {
    "import_replaces_models": import_replaces_models,
    "turboquant_stub": turboquant_stub,
    "tiles_not_in_float32": tiles_not_in_float32,
    "lora_width_of_three_bits": lora_width_of_three_bits,
    "predicate_is_dropped": predicate_is_dropped,
    "delta_capture_eps": delta_capture_eps,
    "packed_ring_is_not_reloaded": packed_ring_is_not_reloaded,
    "ngram_keeps_rejected": ngram_keeps_rejected,
    "hook_ignores_no_bits": hook_ignores_no_bits,
    "nemotron_h_layers_by_slot": nemotron_h_layers_by_slot,
    "gemma3n_packed": gemma3n_packed,
    "tiles_before_widths": tiles_before_widths,
}


def main(arguments: Sequence[str]) -> int:
    """Try every fact, or those that are named after the folder."""
    folder, *names = arguments
    with tempfile.TemporaryDirectory() as home:
        os.environ["OPTIQ_HOME"] = home  # settings of whoever runs this must not decide
        for name in names or FACTS:
            try:
                holds, observed = FACTS[name](Path(folder))
            except Exception as error:  # noqa: BLE001 - a fact that cannot be tried does not hold, and costs no other
                holds, observed = False, f"it cannot be tried: {type(error).__name__}: {error}"
            print(json.dumps({"name": name, "holds": bool(holds), "observed": observed}), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
