"""The gated layer against its definition, one rounding at a time, and that gate and up are not exchanged."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.activation import swiglu
from engine.linear import Linear
from engine.mlp import FusedGatedMLP, GatedMLP

dtypes = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])


def by_definition(gate: mx.array, up: mx.array) -> mx.array:
    """Products in numpy float32, each rounded to the dtype; the sigmoid is mlx's (its exp is not numpy's)."""

    def rounded_product(a: mx.array, b: mx.array) -> mx.array:
        wide = np.array(a.astype(mx.float32)) * np.array(b.astype(mx.float32))
        return mx.array(wide).astype(gate.dtype)

    return rounded_product(rounded_product(gate, mx.sigmoid(gate)), up)


@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-3, 1.0, 20.0]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_swiglu_is_its_definition_bit_for_bit(
    same_bits: Callable[..., None], normal: Callable[..., mx.array], seed: int, scale: float, dtype: mx.Dtype
) -> None:
    gate, up = ((normal(seed + i, (3, 33)) * scale).astype(dtype) for i in (0, 1))
    same_bits(by_definition(gate, up), swiglu(gate, up))


def test_the_sigmoid_is_that_of_the_absolute_value_mirrored(same_bits: Callable[..., None]) -> None:
    x = mx.array(np.random.default_rng(3).standard_normal(500, dtype=np.float32) * 8)
    one = np.float32(1)
    small = one / (one + np.array(mx.exp(mx.abs(x))))
    same_bits(np.where(np.array(x) < 0, small, one - small), mx.sigmoid(x))


@dtypes
def test_another_order_of_the_products_is_another_result(
    other_bits: Callable[..., None], normal: Callable[..., mx.array], dtype: mx.Dtype
) -> None:
    gate, up = normal(0, (8, 64), dtype), normal(1, (8, 64), dtype)
    other_bits(gate * (mx.sigmoid(gate) * up), swiglu(gate, up))
    other_bits(swiglu(up, gate), swiglu(gate, up))


@dtypes
def test_the_layer_is_down_of_gate_and_up(
    same_bits: Callable[..., None], normal: Callable[..., mx.array], dtype: mx.Dtype
) -> None:
    gate, up, down = (normal(seed, shape, dtype) for seed, shape in ((0, (48, 32)), (1, (48, 32)), (2, (32, 48))))
    layer = GatedMLP(
        path="m",
        gate=Linear(path="m.gate_proj", weight=gate),
        up=Linear(path="m.up_proj", weight=up),
        down=Linear(path="m.down_proj", weight=down),
        activation=swiglu,
    )
    x = normal(3, (2, 3, 32), dtype)
    same_bits(by_definition(x @ gate.T, x @ up.T) @ down.T, layer(x))


@dtypes
def test_the_fused_layer_is_the_gated_one_with_gate_above_up(
    same_bits: Callable[..., None], normal: Callable[..., mx.array], dtype: mx.Dtype
) -> None:
    gate, up, down = (normal(seed, shape, dtype) for seed, shape in ((0, (48, 32)), (1, (48, 32)), (2, (32, 48))))
    layer = FusedGatedMLP(
        path="m",
        gate_up=Linear(path="m.gate_up_proj", weight=mx.concatenate([gate, up])),
        down=Linear(path="m.down_proj", weight=down),
        activation=swiglu,
    )
    x = normal(3, (2, 3, 32), dtype)
    same_bits(by_definition(x @ gate.T, x @ up.T) @ down.T, layer(x))
