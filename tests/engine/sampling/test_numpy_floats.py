"""The numpy floats are mlx's, bit for bit, except where they say that they are not."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import numpy_floats as floats

SameBits = Callable[[Any, Any], None]
INF = np.inf


@pytest.fixture(scope="module")
def rows() -> Any:
    rng = np.random.default_rng(5)
    wide = (rng.standard_normal((6, 3000)) * 4).astype(np.float32)
    wide[1, ::3] = -INF
    wide[2] *= 20
    wide[3] = 0
    return wide


def test_exponentials_are_those_of_mlx() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    special = np.array([0, -0.0, INF, -INF, 88, 88.01, -88, -88.01, 1e-40], np.float32)
    near = np.linspace(-89, 89, 200_000, dtype=np.float32)
    for values in (words.view(np.float32), special, near):
        finite = values[~np.isnan(values)]
        assert np.array_equal(floats.exp(finite).view(np.uint32), np.array(mx.exp(mx.array(finite))).view(np.uint32))
    assert np.isnan(floats.exp(np.array([np.nan], np.float32))).all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_rounding_to_bfloat16_is_that_of_mlx(values: list[float]) -> None:
    array = np.array(values, np.float32)
    theirs = np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(floats.rounded(array, "bf16").view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_log_sum_exp_and_softmax_are_those_of_mlx(rows: Any, same_bits: SameBits, dtype: Any) -> None:
    values = floats.rounded(rows, dtype)
    theirs = mx.array(values).astype({"f32": mx.float32, "bf16": mx.bfloat16}[dtype])
    same_bits(mx.logsumexp(theirs, axis=-1, keepdims=True).astype(mx.float32), floats.logsumexp(values, dtype))
    same_bits(mx.softmax(theirs, axis=-1).astype(mx.float32), floats.softmax(values, dtype))


def test_sums_are_those_of_mlx(rows: Any, same_bits: SameBits) -> None:
    e = floats.exp(rows[:2])
    same_bits(mx.cumsum(mx.array(e), axis=-1), floats.cumulative(e))


def test_logarithms_are_within_one_ulp_of_mlx_and_seldom_that_far(ulps: Callable[..., int]) -> None:
    drawn = np.random.default_rng(2).random(200_000, dtype=np.float32)
    theirs, ours = np.array(mx.log(mx.array(drawn))), floats.log(drawn)
    assert ulps(theirs, ours) <= 1
    assert (theirs.view(np.uint32) != ours.view(np.uint32)).mean() < 0.01
    assert floats.log(np.zeros(1, np.float32))[0] == -INF


def test_one_rounding_is_not_two() -> None:
    # The product is 2**-24 + 2**-60: 1 plus it lies just above the middle of two floats, and in float64 on the middle.
    a, b = np.array([4097], np.float32), np.array([16773121 * 2.0**-60], np.float32)
    assert np.float32(1.0 + float(a[0]) * float(b[0])) == 1, "two roundings fall back to 1"
    assert floats._fused(a, b, np.float32(1))[0] == np.nextafter(np.float32(1), np.float32(2))
    # Just below the middle above 1 + 2**-23, where a tie would go up to even.
    above = np.nextafter(np.float32(1), np.float32(2))
    c, d = np.array([4095], np.float32), np.array([16781313 * 2.0**-60], np.float32)  # 2**-24 - 2**-60
    assert floats._fused(c, d, above)[0] == above
    # A true tie goes to even.
    half = np.array([2.0**-12], np.float32)
    assert floats._fused(half, half, np.float32(1))[0] == 1
