# ruff: noqa: ANN001, ANN201, ANN202, ARG001 - Numba reads these signatures; what is compiled takes numbers only
# mypy: disable-error-code="attr-defined,call-arg,var-annotated,unreachable,import-untyped"
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return,no-untyped-call"
"""The activation between the products of a feed-forward layer, with a gate or without, as a part of a step.

Guarantees: those of `engine.kernels.parts`.

Numerics: each operation is mlx's, in mlx's order, rounded to the activations' dtype where mlx rounds. The power and the
hyperbolic tangent are the C library's; the error function is mlx's own on the CPU, not the C library's.
Source: spec/cpu.md section 1; Abramowitz and Stegun 1964, 7.1.26 (the error function).
"""

import math
from typing import Any, Final

import numpy as np
from numba import njit, types

from engine.kernels.driver import DONE, NEXT
from engine.kernels.fields import (
    A_CHOSEN,
    A_INNER,
    ACTIVATION,
    GATE,
    GATE_BIAS,
    GATE_WIDTH,
    GATED,
    GEGLU,
    GEGLU_APPROX,
    GELU,
    ROUNDING,
    ROWS,
    UP_AT,
    UP_BIAS,
    UP_FROM,
    UP_WIDTH,
)
from engine.kernels.memory import float_at, put_float, take, word_at
from engine.kernels.parts import PART, finished
from engine.kernels.scalar import exponential, fused, rounded

PIECE: Final = 512  # elements of an activation that are worth handing out

_f32 = np.float32

CUBIC: Final = _f32(0.044715)
ROOT: Final = _f32(math.sqrt(2 / math.pi))
ROOT_2: Final = _f32(math.sqrt(2))
_powf = types.ExternalFunction("powf", types.float32(types.float32, types.float32))
_tanhf = types.ExternalFunction("tanhf", types.float32(types.float32))
SLOPE: Final = _f32(0.3275911)
A5, A4, A3, A2, A1 = (_f32(c) for c in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592))


@njit(nogil=True, error_model="numpy")
def error_function(v):
    """erf of a float32, unrounded; the sign of a zero is a negative number's, as mlx has it."""
    t = _f32(_f32(1.0) / fused(SLOPE, abs(v), _f32(1.0)))
    r = fused(A5, t, A4)
    r = fused(r, t, A3)
    r = fused(r, t, A2)
    r = fused(r, t, A1)
    e = _f32(-exponential(_f32(-v * v)))
    y = fused(_f32(e * t), r, _f32(1.0))
    return y if v > _f32(0.0) else _f32(-y)


@njit(nogil=True, error_model="numpy")
def exact_gelu(g, root, to):
    """gelu of one element, through erf."""
    normal = rounded(error_function(rounded(_f32(g / root), to)), to)
    twice = rounded(_f32(g * rounded(_f32(_f32(1.0) + normal), to)), to)
    return rounded(_f32(twice / _f32(2.0)), to)


@njit(nogil=True, error_model="numpy")
def logistic_gate(gate, up, out, count, to):
    """silu(gate) * up of some elements."""
    for i in range(count):
        g = float_at(gate, i)
        e = rounded(exponential(abs(g)), to)
        y = _f32(_f32(1.0) / _f32(_f32(1.0) + e))
        s = rounded(y if g < _f32(0.0) else _f32(_f32(1.0) - y), to)
        silu = rounded(_f32(g * s), to)
        put_float(out, i, rounded(_f32(silu * float_at(up, i)), to))


@njit(nogil=True, error_model="numpy")
def normal_gate(gate, up, out, count, to):
    """gelu_approx(gate) * up of some elements."""
    cubic, root, half = rounded(CUBIC, to), rounded(ROOT, to), _f32(0.5)
    for i in range(count):
        g = float_at(gate, i)
        cube = rounded(_powf(g, _f32(3.0)), to)
        inner = rounded(_f32(root * rounded(_f32(g + rounded(_f32(cubic * cube), to)), to)), to)
        factor = rounded(_f32(_f32(1.0) + rounded(_tanhf(inner), to)), to)
        gelu = rounded(_f32(rounded(_f32(half * g), to) * factor), to)
        put_float(out, i, rounded(_f32(gelu * float_at(up, i)), to))


@njit(nogil=True, error_model="numpy")
def exact_gate(gate, up, out, count, to):
    """gelu(gate) * up of some elements."""
    root = rounded(ROOT_2, to)
    for i in range(count):
        put_float(out, i, rounded(_f32(exact_gelu(float_at(gate, i), root, to) * float_at(up, i)), to))


@njit(nogil=True, error_model="numpy")
def exact_alone(x, out, count, to):
    """gelu of some elements."""
    root = rounded(ROOT_2, to)
    for i in range(count):
        put_float(out, i, exact_gelu(float_at(x, i), root, to))


def build_gate() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """GATED = activation(GATE) * UP, or activation(GATE); pieces are runs of elements of a row."""

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def gate(fields, context, thread, control):
        rows, width, to = word_at(context, ROWS), word_at(fields, A_INNER), word_at(context, ROUNDING)
        rows *= max(1, word_at(fields, A_CHOSEN))
        runs, kind = (width + PIECE - 1) // PIECE, word_at(fields, ACTIVATION)
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= rows * runs:
                return rows * runs
            row, start = piece // runs, piece % runs * PIECE
            count = min(width - start, PIECE)
            g = word_at(context, GATE) + (row * word_at(fields, GATE_WIDTH) + start) * 4
            out = word_at(context, GATED) + (row * width + start) * 4
            bias = word_at(fields, GATE_BIAS)
            finished(g, bias + start * 4 if bias else 0, g, count, to)
            u = 0
            if word_at(fields, UP_FROM):
                u = word_at(context, word_at(fields, UP_FROM))
                u += (row * word_at(fields, UP_WIDTH) + word_at(fields, UP_AT) + start) * 4
                bias = word_at(fields, UP_BIAS)
                finished(u, bias + start * 4 if bias else 0, u, count, to)
            if kind == GELU:
                exact_alone(g, out, count, to)
            elif kind == GEGLU:
                exact_gate(g, u, out, count, to)
            elif kind == GEGLU_APPROX:
                normal_gate(g, u, out, count, to)
            else:
                logistic_gate(g, u, out, count, to)
            take(control + 8 * DONE, 1)

    return gate
