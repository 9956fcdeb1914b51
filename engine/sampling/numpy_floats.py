"""mlx's float arithmetic on an x86 CPU, with numpy alone: the functions that the sampling path needs.

Arrays are float32 throughout; a bfloat16 value is a float32 one with 16 low bits of zero, and `rounded` takes a result there.

Guarantees: `exp`, `cumulative`, `softmax` and `rounded` give mlx 0.32.4's bits. `log` does not always: mlx calls the C
library's `logf`, which is not correctly rounded; here it is float64 rounded, which differs by 1 ULP for about 8 in 1,000
uniforms (`tests/engine/sampling/test_numpy_floats.py` measures it). What follows from `log` says so.
Source: spec/cpu.md section 1.
"""

from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
DType = Literal["f32", "bf16"]

HALF: Final = 1 << 28  # the dropped bits of a float64 that lies midway between two float32 values
DROPPED: Final = (1 << 29) - 1
LOG2_E: Final = np.float32(1.442695)
EXP2_TAYLOR: Final = (  # of 2**x around 0, highest power first, after the leading coefficient
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
EXP2_LEADING: Final = np.float32(1.535336188319500e-4)


def rounded(values: Floats, dtype: DType) -> Floats:
    """Values rounded to a dtype, to nearest, ties to even; NaN stays NaN."""
    if dtype == "f32":
        return values
    words = np.ascontiguousarray(values).view(np.uint32)
    nearest = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, nearest.view(np.float32))


def exp(values: Floats) -> Floats:
    """Exponential, same shape.

    Numerics: 2**n times a polynomial of degree 6 in fused multiply-adds; 0 below -88 and inf above 88.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values * LOG2_E
        whole = np.floor(scaled.astype(np.float64) + 0.5).astype(np.float32)
        part = scaled - whole
        power = np.full_like(part, EXP2_LEADING)
        for coefficient in EXP2_TAYLOR:
            power = _fused(power, part, np.float32(coefficient))
        exponent = np.clip(np.nan_to_num(whole, nan=0.0), -127, 128).astype(np.int32) + np.int32(127)
        result = (exponent << 23).astype(np.int32).view(np.float32) * power
    result = np.where(values > 88, np.float32(np.inf), np.where(values < -88, np.float32(0), result))
    return np.where(np.isnan(values), values, result)


def log(values: Floats) -> Floats:
    """Natural logarithm, float64 rounded to float32; see above. -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.log(values.astype(np.float64)).astype(np.float32)


def cumulative(values: Floats) -> Floats:
    """Sums from the left along the last axis, each the one before plus one value, rounded to float32."""
    with np.errstate(over="ignore"):
        return np.cumsum(values, axis=-1, dtype=np.float32)


def logsumexp(rows: Floats, dtype: DType) -> Floats:
    """Log of the sum of exponentials of each row [B, V], as [B, 1]; in float32, then rounded to the dtype."""
    top = rows.max(axis=-1, keepdims=True)
    return rounded(log(cumulative(exp(rows - top))[:, -1:]) + top, dtype)


def softmax(rows: Floats, dtype: DType) -> Floats:
    """Softmax of rows [B, V].

    Numerics: every operation rounds to the dtype, the running sum of bfloat16 rows included.
    """
    e = rounded(exp(rounded(rows - rows.max(axis=-1, keepdims=True), dtype)), dtype)
    total = cumulative(e)[:, -1:] if dtype == "f32" else _bfloat16_sum(e)
    return rounded(e * rounded(np.float32(1) / total, dtype), dtype)


def _bfloat16_sum(rows: Floats) -> Floats:
    """Sums of rows whose running value rounds to bfloat16 at each step, [B, 1]; zeros are passed over, as they add nothing."""
    sums = np.empty((rows.shape[0], 1), np.float32)
    for index, row in enumerate(rows):
        words = np.ascontiguousarray(row[row != 0]).tolist()
        total = np.zeros(1, np.float32)
        for word in words:
            total = rounded(total + np.float32(word), "bf16")
        sums[index] = total
    return sums


def _fused(a: Floats, b: Floats, c: np.float32) -> Floats:
    """a * b + c with one rounding.

    The product is exact in float64 and the sum rounds there, so rounding it again to float32 errs only where the float64 lies
    midway between two float32 values without the exact sum doing so; such a sum is moved off the middle first.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + np.float64(c)
    (middle,) = np.nonzero((total.view(np.int64).reshape(-1) & DROPPED) == HALF)
    if middle.size:
        flat, p = total.reshape(-1), product.reshape(-1)[middle]
        s = flat[middle]
        back = s - p
        lost = (p - (s - back)) + (np.float64(c) - back)
        flat[middle] = np.where(lost == 0, s, np.nextafter(s, np.copysign(np.inf, lost)))
    return total.astype(np.float32)
