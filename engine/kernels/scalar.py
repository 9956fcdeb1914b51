# ruff: noqa: ANN001, ANN201, ANN401, ARG001 - Numba reads these signatures; what is compiled takes numbers only
# mypy: disable-error-code="attr-defined,call-arg,import-untyped,untyped-decorator,no-untyped-def,no-any-return"
# mypy: disable-error-code="no-untyped-call,var-annotated,unreachable"
"""Single values as mlx computes them: rounding to the activations' dtype, the exponential, the logistic function, gelu.

Guarantees: no operation is contracted or reordered, so a loop over these functions may be widened into vectors and keeps its
bits. What a NaN's payload becomes is not kept: whoever uses these marks a NaN and hands the work to mlx.

Source: spec/cpu.md section 1.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels import contraction
from engine.kernels.driver import has_half_precision
from engine.kernels.tile import STORED

F32, BF16, F16 = (STORED.index(name) for name in ("f32", "bf16", "f16"))  # what values are rounded to

_f32, _f64, _i32 = np.float32, np.float64, np.int32
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

LOG2_E: Final = _f32(1.442695)
HORNER: Final = tuple(  # of 2^x for x in [-0.5, 0.5], highest power first
    _f32(c)
    for c in (
        1.535336188319500e-4,
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
    )
)
H0, H1, H2, H3, H4, H5 = HORNER


@intrinsic
def rounded(_typing: Any, value: Any, to: Any) -> Any:
    """A float32 rounded to the dtype `to`, an index into `STORED`, and widened again; ties to even.

    All dtypes are computed and one is chosen, without a branch: loops over it stay vectors, and one variant serves all.
    """

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        x, to = args
        u = b.bitcast(x, _I32)
        odd = b.and_(b.lshr(u, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        u = b.add(b.add(u, ir.Constant(_I32, 0x7FFF)), odd)
        brain = b.bitcast(b.and_(u, ir.Constant(_I32, 0xFFFF0000)), _F32)
        value = b.select(b.icmp_signed("==", to, ir.Constant(_I64, BF16)), brain, x)
        if not has_half_precision():
            return value  # a model in float16 is never put on kernels there
        half = b.fpext(b.fptrunc(x, ir.HalfType()), _F32)
        return b.select(b.icmp_signed("==", to, ir.Constant(_I64, F16)), half, value)

    return types.float32(types.float32, types.int64), generate


@intrinsic
def fused(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def product_sum(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, with the roundings of mlx's products on this machine (`engine.kernels.contraction`)."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if contraction.contracts():
            return builder.fma(*args)
        return builder.fadd(builder.fmul(*args[:2]), args[2])

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def _as_float(_typing: Any, word: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), generate


@njit(nogil=True, error_model="numpy")
def exponential(v):
    """e^v in float32, mlx's polynomial."""
    x = _f32(v * LOG2_E)
    whole = _f32(np.floor(_f64(x) + 0.5))
    part = _f32(x - whole)
    r = fused(H0, part, H1)
    r = fused(r, part, H2)
    r = fused(r, part, H3)
    r = fused(r, part, H4)
    r = fused(r, part, H5)
    r = fused(r, part, _f32(1.0))
    r = _f32(_as_float(_i32((_i32(whole) + _i32(127)) << _i32(23))) * r)
    r = _f32(np.inf) if v > _f32(88.0) else r
    return _f32(0.0) if v < _f32(-88.0) else r
