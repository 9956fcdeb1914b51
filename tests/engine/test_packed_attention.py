"""Attention over packed keys with sinks: the softmax written out, a group's heads apart, and sinks that weigh nothing."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.protocol import PackedHeads
from engine.cache.quantized import pack
from engine.packed_attention import attend_packed, grouped, packed_product

Normal = Callable[..., mx.array]

E, SCALE = 64, 64**-0.5


def inputs(normal: Normal, dtype: mx.Dtype, *, L: int, T: int) -> tuple[mx.array, PackedHeads, PackedHeads]:
    q, k, v = normal(0, (2, 6, L, E), dtype), normal(1, (2, 2, T, E), dtype), normal(2, (2, 2, T, E), dtype)
    return q, pack(k, bits=8, group_size=32), pack(v, bits=8, group_size=32)


def unpacked(heads: PackedHeads) -> np.ndarray:  # type: ignore[type-arg]
    whole = mx.dequantize(heads.weight, heads.scales, heads.biases, group_size=heads.group_size, bits=heads.bits)
    return np.repeat(np.array(whole.astype(mx.float32)), 3, axis=1).astype(np.float64)


def test_sinks_take_a_share_of_the_softmax_and_carry_no_value(normal: Normal) -> None:
    L, T = 3, 9
    q, keys, values = inputs(normal, mx.float32, L=L, T=T)
    sinks = normal(3, (6,))
    scores = np.array(q, dtype=np.float64) * SCALE @ unpacked(keys).swapaxes(-1, -2)
    scores = np.where(np.tri(L, T, T - L, dtype=bool), scores, -np.inf)
    weights = np.exp(scores)
    share = weights.sum(-1, keepdims=True) + np.exp(np.array(sinks, dtype=np.float64))[:, None, None]
    expected = weights / share @ unpacked(values)
    actual = np.array(attend_packed(q, keys, values, scale=SCALE, mask="causal", sinks_H=sinks))
    assert np.abs(actual - expected).max() < 1e-6
    without = np.array(attend_packed(q, keys, values, scale=SCALE, mask="causal"))
    assert np.abs(actual - without).max() > 0.01


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_each_head_has_its_own_sink(normal: Normal, dtype: mx.Dtype) -> None:
    q, keys, values = inputs(normal, dtype, L=2, T=5)
    sinks = normal(3, (6,), dtype)
    together = attend_packed(q, keys, values, scale=SCALE, mask=None, sinks_H=sinks)
    moved = mx.concatenate([sinks[:4], sinks[4:5] + 3, sinks[5:]])
    other = attend_packed(q, keys, values, scale=SCALE, mask=None, sinks_H=moved)
    differ = [bool(mx.any(together[:, head] != other[:, head]).item()) for head in range(6)]
    assert differ == [False] * 4 + [True, False]
    assert together.dtype == dtype


def test_sinks_far_below_every_score_weigh_nothing(normal: Normal) -> None:
    q, keys, values = inputs(normal, mx.float32, L=2, T=5)
    plain = np.array(attend_packed(q, keys, values, scale=SCALE, mask=None))
    sunk = np.array(attend_packed(q, keys, values, scale=SCALE, mask=None, sinks_H=mx.full((6,), -1e4)))
    assert np.abs(plain - sunk).max() < 1e-6


def test_a_group_of_heads_meets_its_one_matrix(normal: Normal) -> None:
    q, keys, _ = inputs(normal, mx.float32, L=2, T=5)
    scores = packed_product(grouped(q, 2), keys, transpose=True)
    assert scores.shape == (2, 2, 3, 2, 5)
    expected = np.array(q, dtype=np.float64) @ unpacked(keys).swapaxes(-1, -2)
    assert np.abs(np.array(scores).reshape(2, 6, 2, 5) - expected).max() < 1e-5
