"""The activations against their formulas in numpy, rounded after every operation to the arrays' dtype.

What the C library gives (erf, tanh) and mlx's own exp and power are taken from mlx as they come; every other operation, and
the dtype that constants are rounded to, is done here.
"""

import math
from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.activation import clipped_swiglu, geglu, geglu_approx, gelu, gelu_approx, silu, soft_capped

Floats = npt.NDArray[np.float32]
Check = Callable[..., None]
Normal = Callable[..., mx.array]

dtypes = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
any_case = {
    "seed": st.integers(0, 2**32 - 1),
    "scale": st.sampled_from([1e-3, 1.0, 4.0]),
    "dtype": st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
}


class Rounding(Protocol):
    def __call__(self, values: Floats | float) -> Floats: ...


def rounding(dtype: mx.Dtype) -> Rounding:
    """Float32 values, or a constant, rounded to a dtype; a 16-bit operation done in float32 and rounded is exact enough."""

    def rounded(values: Floats | float) -> Floats:
        return wide(mx.array(np.asarray(values, dtype=np.float32)).astype(dtype))

    return rounded


def wide(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))


def by_mlx(function: Callable[[mx.array], mx.array], values: Floats, dtype: mx.Dtype) -> Floats:
    return wide(function(mx.array(values).astype(dtype)))


def gelu_by_definition(x: mx.array) -> Floats:
    r, X = rounding(x.dtype), wide(x)
    grown = r(1 + by_mlx(mx.erf, r(X / r(math.sqrt(2))), x.dtype))
    return r(r(X * grown) / r(2.0))


def gelu_approx_by_definition(x: mx.array) -> Floats:
    r, X = rounding(x.dtype), wide(x)
    cubed = by_mlx(lambda a: mx.power(a, 3), X, x.dtype)
    inner = r(r(math.sqrt(2 / math.pi)) * r(X + r(r(0.044715) * cubed)))
    return r(r(r(0.5) * X) * r(1 + by_mlx(mx.tanh, inner, x.dtype)))


@given(**any_case)
@settings(max_examples=30, deadline=None)
def test_silu_rounds_the_sigmoid_and_then_the_product(
    *, normal: Normal, same_bits: Check, seed: int, scale: float, dtype: mx.Dtype
) -> None:
    x = (normal(seed, (67,)) * scale).astype(dtype)
    expected = rounding(dtype)(wide(x) * by_mlx(mx.sigmoid, wide(x), dtype))
    same_bits(mx.array(expected).astype(dtype), silu(x))


@given(**any_case)
@settings(max_examples=30, deadline=None)
def test_gelu_rounds_every_operation(
    *, normal: Normal, same_bits: Check, seed: int, scale: float, dtype: mx.Dtype
) -> None:
    x = (normal(seed, (67,)) * scale).astype(dtype)
    same_bits(mx.array(gelu_by_definition(x)).astype(dtype), gelu(x))


@given(**any_case)
@settings(max_examples=30, deadline=None)
def test_the_tanh_form_rounds_every_operation(
    *, normal: Normal, same_bits: Check, seed: int, scale: float, dtype: mx.Dtype
) -> None:
    x = (normal(seed, (67,)) * scale).astype(dtype)
    same_bits(mx.array(gelu_approx_by_definition(x)).astype(dtype), gelu_approx(x))


@dtypes
@pytest.mark.parametrize(("gated", "plain"), [(geglu, gelu_by_definition), (geglu_approx, gelu_approx_by_definition)])
def test_a_gated_form_is_rounded_once_more_by_its_second_factor(
    *,
    normal: Normal,
    same_bits: Check,
    other_bits: Check,
    dtype: mx.Dtype,
    gated: Callable[[mx.array, mx.array], mx.array],
    plain: Callable[[mx.array], Floats],
) -> None:
    gate, up = normal(0, (8, 64), dtype), normal(1, (8, 64), dtype)
    expected = rounding(dtype)(plain(gate) * wide(up))
    same_bits(mx.array(expected).astype(dtype), gated(gate, up))
    other_bits(gated(up, gate), gated(gate, up))


@dtypes
def test_the_cube_is_no_pair_of_products(normal: Normal, other_bits: Check, dtype: mx.Dtype) -> None:
    x = normal(0, (50_000,), dtype)  # the difference seldom survives the sum and the tanh
    cubed = x * x * x
    by_products = 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * cubed)))
    other_bits(by_products, gelu_approx(x))


@dtypes
def test_the_two_forms_of_gelu_are_two_functions_that_differ_little(
    normal: Normal, other_bits: Check, dtype: mx.Dtype
) -> None:
    x = normal(0, (1000,), dtype)
    other_bits(gelu(x), gelu_approx(x))
    assert np.abs(wide(gelu(x)) - wide(gelu_approx(x))).max() < 0.02


@dtypes
@pytest.mark.parametrize("activation", [silu, gelu, gelu_approx])
def test_zero_stays_zero_and_large_values_pass_or_vanish(
    dtype: mx.Dtype, activation: Callable[[mx.array], mx.array]
) -> None:
    out = activation(mx.array([0.0, 20.0, -20.0]).astype(dtype))
    assert out.dtype == dtype
    zero, large, small = wide(out).tolist()
    assert (zero, large) == (0.0, 20.0)
    assert -1e-7 < small <= 0.0


def test_known_values_of_the_normal_distribution() -> None:
    # x * Phi(x) at 1 and -1, from tables of the normal distribution: Phi(1) = 0.8413447
    one, minus = gelu(mx.array([1.0, -1.0])).tolist()
    assert abs(one - 0.8413447) < 1e-6
    assert abs(minus + 0.1586553) < 1e-6


@dtypes
@pytest.mark.parametrize("cap", [0.5, 15.0, 30.0])
def test_a_soft_cap_rounds_quotient_tanh_and_product(
    normal: Normal, same_bits: Check, dtype: mx.Dtype, cap: float
) -> None:
    x, r = normal(0, (500,), dtype) * 20, rounding(dtype)
    expected = r(by_mlx(mx.tanh, r(wide(x) / r(cap)), dtype) * r(cap))
    same_bits(mx.array(expected).astype(dtype), soft_capped(x, cap))
    assert np.abs(wide(soft_capped(x, cap))).max() <= cap


@dtypes
def test_the_clipped_gate_rounds_every_operation(normal: Normal, same_bits: Check, dtype: mx.Dtype) -> None:
    gate, up, r = normal(0, (500,), dtype) * 5, normal(1, (500,), dtype) * 5, rounding(dtype)
    g, u = np.minimum(wide(gate), np.float32(7)), np.clip(wide(up), np.float32(-7), np.float32(7))
    assert (wide(gate) > 7).any()
    assert (np.abs(wide(up)) > 7).any()
    assert (wide(gate) < -7).any()  # a gate is clipped from above only
    weighed = r(g * by_mlx(mx.sigmoid, r(r(1.702) * g), dtype))
    same_bits(mx.array(r(r(u + 1) * weighed)).astype(dtype), clipped_swiglu(gate, up))
