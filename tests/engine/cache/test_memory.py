"""The formulas give the bytes of real arrays, and the published examples."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache as once

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.convert import KVMode
from engine.cache.group import CacheGroup
from engine.cache.memory import (
    CacheShape,
    allocated_positions,
    head_bytes,
    live_bytes,
    marginal_bytes,
    shapes_of,
    token_bytes,
)
from engine.cache.per_layer import LayerWidth
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.recurrent import RecurrentCache
from engine.generate import Feed, forced, steps
from engine.model import CausalModel, open_model
from parity.models.fetch import ensure_snapshot

MINICPM5 = [[CacheShape(heads=2, key_width=128, value_width=128)]] * 24
FULL = [CacheShape(heads=1, key_width=512, value_width=512)]
SLIDING = [CacheShape(heads=8, key_width=256, value_width=256, window=1024)]
GEMMA4_12B = [FULL] * 8 + [SLIDING] * 40
SHIPPED = KVMode(layers=tuple(LayerWidth(cache=place, bits=8 if place < 6 else 4) for place in range(24)))


@pytest.mark.parametrize(("bits", "bytes_an_element"), [(8, 1.0625), (4, 0.5625), (2, 0.3125), (None, 2)])
def test_an_element_costs_its_bits_and_its_share_of_scale_and_bias(bits: int | None, bytes_an_element: float) -> None:
    width = None if bits is None else (bits, 64)
    assert head_bytes(128, itemsize=2, width=width) == 128 * bytes_an_element


@pytest.mark.parametrize(
    ("mode", "per_token"),
    [(KVMode(), 24_576), (KVMode(bits=8), 13_056), (KVMode(bits=4), 6_912), (SHIPPED, 8_448)],
)
def test_the_published_bytes_a_token_of_minicpm5(mode: KVMode, per_token: int) -> None:
    assert marginal_bytes(MINICPM5, mode) == marginal_bytes(MINICPM5, mode, 10_000) == per_token
    assert live_bytes(MINICPM5, mode, 100) == 100 * per_token


def test_the_published_bytes_of_gemma4_12b() -> None:
    assert 8 * token_bytes(FULL[0]) == 16_384
    assert 40 * token_bytes(SLIDING[0]) == 327_680
    assert live_bytes([SLIDING] * 40, KVMode(), 32_768) == 335_544_320
    assert marginal_bytes(GEMMA4_12B, KVMode(), 1023) == 16_384 + 327_680
    assert marginal_bytes(GEMMA4_12B, KVMode(), 1024) == 16_384


def test_a_state_costs_the_same_at_every_length() -> None:
    heads, value, key, window, channels = 16, 128, 128, 4, 8192
    state = CacheShape(state=heads * value * key * 4 + (window - 1) * channels * 2)
    assert live_bytes([[state]], KVMode(), 1) == live_bytes([[state]], KVMode(), 9999) == 1_097_728
    assert marginal_bytes([[state]], KVMode()) == 0


def test_the_published_capacities_of_a_growing_buffer() -> None:
    assert [allocated_positions([1, 255, 1, 300, 1][:n]) for n in range(1, 6)] == [256, 256, 512, 769, 769]
    assert [allocated_positions([6, 1, 249, 1, 1][:n]) for n in range(1, 6)] == [256, 256, 256, 512, 512]


@settings(deadline=None, max_examples=40)
@given(appends=st.lists(st.integers(1, 400), max_size=6))
def test_a_growing_buffer_is_as_long_as_the_rule_says(appends: list[int]) -> None:
    cache = PlainCache()
    for length in appends:
        new = mx.zeros((1, 1, length, 2), dtype=mx.bfloat16)
        cache = cache.append(new, new)[0]
    shape = CacheShape(heads=1, key_width=2, value_width=2)
    assert sum(array.nbytes for array in cache.arrays) == allocated_positions(appends) * token_bytes(shape)


@once
def model(name: str, dtype: str) -> CausalModel:
    return open_model(ensure_snapshot(name).path, dtype=dtype)  # type: ignore[arg-type]


def held_bytes(cache: Cache) -> int:
    """Bytes of the positions in use, by slicing the real arrays."""
    if isinstance(cache, CacheGroup):
        return sum(map(held_bytes, cache.members))
    if isinstance(cache, RecurrentCache):
        return sum(array.nbytes for array in cache.arrays)
    return sum(array[:, :, : cache.offset].nbytes for array in cache.arrays)


def run(name: str, dtype: str, mode: KVMode, tokens: int) -> Sequence[Cache]:
    prompt = list(range(1, tokens))
    (*_, last) = steps(
        model(name, dtype), prompt, num_steps=2, pick=forced([7, 7]), kv=mode, feed=Feed(piece=5)
    )  # fmt: skip
    return last.caches


PACKED = KVMode(bits=8, group_size=32)
BY_LAYER = KVMode(layers=(LayerWidth(cache=1, bits=4, group_size=32),))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama-tiny", KVMode()),
        ("llama-tiny", PACKED),
        ("llama-tiny", replace(PACKED, bits=3, start=8)),
        ("llama-tiny", replace(PACKED, start=100)),
        ("llama-tiny", BY_LAYER),
        ("llama-tiny", KVMode(max_size=12)),
        ("llama-tiny", replace(PACKED, max_size=12)),
        ("llama_sliding-tiny", KVMode()),
        ("llama_sliding-tiny", PACKED),
        ("gemma4_text_ple_kvshared-tiny", BY_LAYER),
        ("qwen3_5-tiny", KVMode()),
        ("qwen3_5-tiny", PACKED),
        ("deepseek_v3-tiny", KVMode()),
        ("deepseek_v32-tiny", KVMode()),
        ("falcon_h1-tiny", KVMode()),
        ("minicpm3-tiny", PACKED),
        ("mamba2-tiny", KVMode()),
    ],
)
@pytest.mark.parametrize("tokens", [9, 30])
def test_live_bytes_are_those_of_the_real_arrays(name: str, mode: KVMode, tokens: int) -> None:
    caches = run(name, "f32", mode, tokens)
    assert live_bytes(shapes_of(model(name, "f32")), mode, tokens) == sum(map(held_bytes, caches))


def test_the_dtype_counts() -> None:
    both = [live_bytes(shapes_of(model("llama-tiny", dtype)), KVMode(), 9) for dtype in ("f32", "bf16")]
    assert both[0] == 2 * both[1]
    caches = run("llama-tiny", "bf16", PACKED, 9)
    assert live_bytes(shapes_of(model("llama-tiny", "bf16")), PACKED, 9) == sum(map(held_bytes, caches))


def test_a_kind_without_a_formula_is_an_error() -> None:
    class Other:
        def make_caches(self) -> tuple[Cache, ...]:
            return (PlainCache(),)

        def hidden(self, ids: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
            return ids, tuple(caches)

    with pytest.raises(TypeError, match="no formula for a cache of kind plain"):
        shapes_of(Other())
