"""Attention over plain and packed heads: groups, masks and single queries change no bit."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Heads, PackedHeads
from engine.cache.quantized import pack

Check = Callable[..., None]
Normal = Callable[..., mx.array]

E, SCALE = 64, 64**-0.5
dtypes = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
kinds = pytest.mark.parametrize("bits", [None, 8, 4, 3])


def stored(array: mx.array, bits: int | None) -> Heads:
    return array if bits is None else pack(array, bits=bits, group_size=32)


def inputs(
    normal: Normal, dtype: mx.Dtype, bits: int | None, *, L: int, T: int, B: int = 1
) -> tuple[mx.array, Heads, Heads]:
    q, k, v = normal(0, (B, 6, L, E), dtype), normal(1, (B, 2, T, E), dtype), normal(2, (B, 2, T, E), dtype)
    return q, stored(k, bits), stored(v, bits)


def first(heads: Heads, T: int) -> Heads:
    if isinstance(heads, mx.array):
        return heads[:, :, :T]
    return replace(heads, weight=heads.weight[:, :, :T], scales=heads.scales[:, :, :T], biases=heads.biases[:, :, :T])


def repeated(heads: Heads, times: int) -> Heads:
    if isinstance(heads, mx.array):
        return mx.repeat(heads, times, axis=1)
    return replace(
        heads,
        weight=mx.repeat(heads.weight, times, axis=1),
        scales=mx.repeat(heads.scales, times, axis=1),
        biases=mx.repeat(heads.biases, times, axis=1),
    )


def causal(L: int, T: int) -> mx.array:
    return mx.array(np.tril(np.ones((L, T), dtype=bool), k=T - L))


def test_a_single_query_needs_no_mask_and_several_are_causal() -> None:
    assert (PlainCache().mask(1), PlainCache().mask(2), PlainCache().mask(300)) == (None, "causal", "causal")


@dtypes
@kinds
@pytest.mark.parametrize("L", [1, 5])
def test_grouped_heads_are_repeated_heads(
    normal: Normal, same_bits: Check, dtype: mx.Dtype, bits: int | None, L: int
) -> None:
    q, keys, values = inputs(normal, dtype, bits, L=L, T=9)
    grouped = attend(q, keys, values, scale=SCALE, mask=PlainCache().mask(L))
    same_bits(attend(q, repeated(keys, 3), repeated(values, 3), scale=SCALE, mask=PlainCache().mask(L)), grouped)


@dtypes
@kinds
def test_several_causal_queries_are_single_ones(
    normal: Normal, same_bits: Check, dtype: mx.Dtype, bits: int | None
) -> None:
    L, T = 5, 9
    q, keys, values = inputs(normal, dtype, bits, L=L, T=T, B=2)
    together = attend(q, keys, values, scale=SCALE, mask="causal")
    for i in range(L):
        seen = T - L + i + 1
        alone = attend(q[:, :, i : i + 1], first(keys, seen), first(values, seen), scale=SCALE, mask=None)
        same_bits(alone, together[:, :, i : i + 1])


@dtypes
@kinds
@pytest.mark.parametrize("axes", [2, 4])
def test_a_boolean_causal_mask_is_the_causal_one(
    normal: Normal, same_bits: Check, dtype: mx.Dtype, bits: int | None, axes: int
) -> None:
    q, keys, values = inputs(normal, dtype, bits, L=5, T=9, B=2)
    mask = causal(5, 9).reshape((1,) * (axes - 2) + (5, 9))
    expected = attend(q, keys, values, scale=SCALE, mask="causal")
    same_bits(expected, attend(q, keys, values, scale=SCALE, mask=mask))


@kinds
def test_a_mask_of_its_own_for_each_sequence_is_kept_apart(normal: Normal, same_bits: Check, bits: int | None) -> None:
    q, keys, values = inputs(normal, mx.float32, bits, L=5, T=9, B=2)
    windowed = causal(5, 9) & (mx.arange(9) >= 3)
    both = attend(q, keys, values, scale=SCALE, mask=mx.stack([causal(5, 9), windowed])[:, None])
    same_bits(attend(q, keys, values, scale=SCALE, mask=causal(5, 9))[:1], both[:1])
    same_bits(attend(q, keys, values, scale=SCALE, mask=windowed)[1:], both[1:])


@dtypes
@kinds
def test_what_is_masked_out_does_not_count(
    normal: Normal, same_bits: Check, other_bits: Check, dtype: mx.Dtype, bits: int | None
) -> None:
    q, k, v = inputs(normal, dtype, None, L=2, T=6)
    last = mx.arange(6)[:, None] == 5
    k2, v2 = mx.where(last, k + 1, k), mx.where(last, v + 1, v)
    one = attend(q, stored(k, bits), stored(v, bits), scale=SCALE, mask="causal")
    two = attend(q, stored(k2, bits), stored(v2, bits), scale=SCALE, mask="causal")
    same_bits(one[:, :, 0], two[:, :, 0])
    other_bits(one[:, :, 1], two[:, :, 1])


@dtypes
@kinds
def test_without_a_mask_every_query_sees_everything(
    normal: Normal, other_bits: Check, dtype: mx.Dtype, bits: int | None
) -> None:
    q, keys, values = inputs(normal, dtype, bits, L=3, T=6)
    other_bits(attend(q, keys, values, scale=SCALE, mask="causal"), attend(q, keys, values, scale=SCALE, mask=None))


@dtypes
@kinds
def test_the_scale_counts(normal: Normal, other_bits: Check, dtype: mx.Dtype, bits: int | None) -> None:
    q, keys, values = inputs(normal, dtype, bits, L=1, T=6)
    other_bits(attend(q, keys, values, scale=SCALE, mask=None), attend(q, keys, values, scale=SCALE * 1.01, mask=None))


@dtypes
@pytest.mark.parametrize("L", [1, 5])
def test_packed_attention_is_its_steps_over_dequantised_heads(
    normal: Normal, same_bits: Check, other_bits: Check, dtype: mx.Dtype, L: int
) -> None:
    q, keys, values = inputs(normal, dtype, 4, L=L, T=9)
    assert isinstance(keys, PackedHeads)
    assert isinstance(values, PackedHeads)
    k, v = (
        mx.repeat(mx.dequantize(h.weight, h.scales, h.biases, group_size=32, bits=4), 3, axis=1) for h in (keys, values)
    )
    scores = (q * SCALE) @ k.swapaxes(-1, -2)
    scores = mx.where(causal(L, 9), scores, mx.finfo(dtype).min)
    expected = mx.softmax(scores, axis=-1, precise=True) @ v
    actual = attend(q, keys, values, scale=SCALE, mask=PlainCache().mask(L))
    # float32 products of packed heads are those of dequantised ones; 16-bit ones round every operation
    (same_bits if dtype == mx.float32 else other_bits)(expected, actual)


@dtypes
def test_packed_attention_normalises_in_float32(normal: Normal, same_bits: Check, dtype: mx.Dtype) -> None:
    q, keys, values = inputs(normal, dtype, 8, L=1, T=300)
    assert isinstance(keys, PackedHeads)
    assert isinstance(values, PackedHeads)
    k, v = ([mx.repeat(a, 3, axis=1) for a in (h.weight, h.scales, h.biases)] for h in (keys, values))
    scores = mx.quantized_matmul(q * SCALE, *k, transpose=True, group_size=32, bits=8)
    weights = mx.softmax(scores.astype(mx.float32), axis=-1).astype(dtype)
    expected = mx.quantized_matmul(weights, *v, transpose=False, group_size=32, bits=8)
    same_bits(expected, attend(q, keys, values, scale=SCALE, mask=None))


@pytest.mark.parametrize("packed", ["keys", "values"])
def test_packed_and_plain_heads_do_not_mix(normal: Normal, packed: str) -> None:
    q, keys, values = inputs(normal, mx.float32, None, L=1, T=6)
    assert isinstance(keys, mx.array)
    assert isinstance(values, mx.array)
    mixed = {"keys": (stored(keys, 8), values), "values": (keys, stored(values, 8))}[packed]
    with pytest.raises(TypeError, match=r"^keys and values must both be packed, or neither$"):
        attend(q, *mixed, scale=SCALE, mask=None)
