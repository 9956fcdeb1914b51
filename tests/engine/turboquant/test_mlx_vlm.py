"""TurboQuant in mlx-vlm's form is mlx-vlm's, bit for bit: codes, what they decode to, attention, and a model's logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.turboquant_vlm import TurboQuantVlmCache
from engine.generate import forced, steps
from engine.turboquant import caches, unit_codec
from engine.turboquant.caches import VlmTurbo, turbo_caches
from engine.turboquant.coded_attention import UnitHeads
from engine.turboquant.unit_codec import UnitCodec
from tests.engine.families.committed_golden import needs_goldens
from tests.engine.tiny_runs import TinyRun

pytestmark = needs_goldens  # the bits were recorded on that platform

Check = Callable[..., None]
FIXTURES: Final = Path(__file__).parents[2] / "fixtures" / "mlx_vlm"
BITS: Final = (2, 3, 3.5, 4, 8)
WIDTHS: Final = (32, 64, 128, 256, 512)
CODED: Final = [
    *((width, bits, "F32") for width in WIDTHS for bits in (BITS if width == 64 else (2, 3.5, 8))),
    *((width, 3.5, "BF16") for width in WIDTHS),
]
MODELS: Final = [
    (name, dtype, bits)
    for name, dtype in (("llama-tiny", "F32"), ("llama-tiny", "BF16"), ("qwen3-tiny", "F32"))
    for bits in BITS
]


def recorded(name: str) -> dict[str, mx.array]:
    loaded = mx.load(str(FIXTURES / f"{name}.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def codes() -> dict[str, mx.array]:
    return recorded("codes")


@pytest.fixture(scope="module")
def logits() -> dict[str, mx.array]:
    return recorded("logits")


def coded(
    codes: dict[str, mx.array], width: int, bits: float, dtype: str
) -> tuple[TurboQuantVlmCache, UnitHeads, UnitHeads]:
    """A cache after pieces of 8 positions and of 1, as the recorder appends them."""
    cast = {"F32": mx.float32, "BF16": mx.bfloat16}[dtype]
    keys, values = (codes[f"{width}.{word}"].astype(cast) for word in ("keys", "values"))
    cache = TurboQuantVlmCache(key_bits=int(bits), value_bits=int(np.ceil(bits)))
    cache, *_ = cache.append(keys[:, :, :8], values[:, :, :8])
    return cache.append(keys[:, :, 8:], values[:, :, 8:])


@pytest.mark.parametrize(("width", "bits", "dtype"), CODED)
def test_codes_and_what_they_decode_to_are_the_oracles(
    codes: dict[str, mx.array], same_bits: Check, width: int, bits: float, dtype: str
) -> None:
    _, *both = coded(codes, width, bits, dtype)
    for word, heads in zip(("keys", "values"), both, strict=True):
        name = f"{width}.{bits}.{dtype}.{word}"
        same_bits(codes[f"{name}.norms"], heads.vectors.norms.squeeze(-1))
        same_bits(codes[f"{name}.codes"], heads.vectors.codes)
        if width == 64:
            same_bits(codes[f"{name}.decoded"], heads.codec.decode(heads.vectors))


@pytest.mark.parametrize(("width", "bits", "dtype"), CODED)
def test_attention_of_one_query_is_the_oracles_with_and_without_a_mask(
    codes: dict[str, mx.array], same_bits: Check, width: int, bits: float, dtype: str
) -> None:
    _, keys, values = coded(codes, width, bits, dtype)
    q_BHLE = codes[f"{width}.queries"].astype({"F32": mx.float32, "BF16": mx.bfloat16}[dtype])
    name = f"{width}.{bits}.{dtype}"
    same_bits(codes[f"{name}.one"], keys.attend(q_BHLE, values, scale=0.2, mask=None))
    window = (mx.arange(9) > 2)[None, None, None]
    same_bits(codes[f"{name}.masked"], keys.attend(q_BHLE, values, scale=0.2, mask=window))


def rows(name: str, dtype: str, bits: float, logits: dict[str, mx.array]) -> mx.array:
    model = TinyRun(snapshot=name, dtype="bf16" if dtype == "BF16" else "f32").model
    prompt, later = ([int(i) for i in np.array(logits[key])] for key in ("prompt", "forced"))
    run = steps(model, prompt, num_steps=8, pick=forced([*later, 0]), caches=turbo_caches(model, VlmTurbo(bits=bits)))
    return mx.concatenate([step.logits_BV for step in run])


@pytest.mark.parametrize(("name", "dtype", "bits"), MODELS)
def test_a_models_logits_are_the_oracles(
    logits: dict[str, mx.array], same_bits: Check, name: str, dtype: str, bits: float
) -> None:
    same_bits(logits[f"{name}.{dtype}.{bits}"], rows(name, dtype, bits, logits))


def test_trim_then_append_again_is_a_cache_that_never_lost_them(codes: dict[str, mx.array], same_bits: Check) -> None:
    fresh, *_ = coded(codes, 64, 3.5, "F32")
    keys, values = codes["64.keys"], codes["64.values"]
    wrong, *_ = fresh.trim(4).append(values[:, :, :4], keys[:, :, :4])
    again, *_ = wrong.trim(4).append(keys[:, :, 5:], values[:, :, 5:])
    for expected, actual in zip(fresh.arrays, again.arrays, strict=True):
        same_bits(expected[:, :, :9], actual[:, :, :9])


def test_every_recorded_row_is_judged(logits: dict[str, mx.array], codes: dict[str, mx.array]) -> None:
    assert {f"{name}.{dtype}.{bits}" for name, dtype, bits in MODELS} == logits.keys() - {"prompt", "forced"}
    assert {f"{w}.{b}.{d}.one" for w, b, d in CODED} == {name for name in codes if name.endswith(".one")}


# The comparison can fail


@pytest.mark.parametrize("fault", ["seed", "share", "last", "rounding"])
def test_a_planted_fault_is_seen(
    logits: dict[str, mx.array], other_bits: Check, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "seed":
        monkeypatch.setattr("engine.cache.turboquant_vlm.VALUE_SEED", 0)
    elif fault == "share":  # the half bit goes to the keys
        monkeypatch.setattr(caches, "TurboQuantVlmCache", lambda **_: TurboQuantVlmCache(key_bits=4, value_bits=3))
    elif fault == "last":  # the last layer is coded too
        really = caches.turbo_caches
        monkeypatch.setitem(globals(), "turbo_caches", lambda model, mode: (really(model, mode)[0],) * 4)
    else:  # the norm is not rounded
        encode = UnitCodec.encode

        def unrounded(codec: UnitCodec, vectors: mx.array) -> unit_codec.CodedVectors:
            norms = mx.linalg.norm(vectors.astype(mx.float32), axis=-1, keepdims=True)
            return unit_codec.CodedVectors(norms=norms, codes=encode(codec, vectors).codes)

        monkeypatch.setattr(UnitCodec, "encode", unrounded)
    other_bits(logits["llama-tiny.F32.3.5"], rows("llama-tiny", "F32", 3.5, logits))
