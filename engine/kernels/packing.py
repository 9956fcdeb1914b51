# ruff: noqa: ANN001, ANN201, ANN202, PLR0917 - Numba reads these signatures; what is compiled takes numbers only
# ruff: noqa: PLR0124 - a NaN is what differs from itself
# mypy: disable-error-code="attr-defined,call-arg,var-annotated,unreachable,import-untyped"
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return,no-untyped-call"
"""The part of a step that packs stored keys and values: codes, scales and biases beside, and in place what these stand for.

mlx's product with a packed matrix computes scale * code, adds the bias, multiplies and sums, each rounded to the activations'
dtype; in float32 on a machine whose wheel contracts, the first two are rounded once, and the other two. So attention over
floats that are the first two of these gives the bits of attention over codes, if it rounds the other two likewise; the floats
stand where attention looks for them.

Guarantees: those of `engine.kernels.parts`. Positions are packed by themselves, so packing a history at once and packing each
row as it comes are one computation. Where a value, or what it is packed to, is not finite, that is marked, and the call is
mlx's.

Numerics: mlx's affine packing in float32, in its order, every operation rounded by itself; then scale and bias are rounded to
the dtype.
Source: spec/kv.md section 3; spec/cpu.md section 1.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from engine.kernels.driver import DONE, NAN, NEXT
from engine.kernels.fields import (
    CODES_AT,
    COLUMNS,
    ELEMENTS,
    GROUPS,
    HEAD,
    HEAD_BLOCKS,
    LAYER,
    OFFSET,
    ROUNDING,
    ROWS,
    SCALES_AT,
    SCRATCH,
    SCRATCH_SIZE,
    SLAB,
    SLABS,
    TOP,
    VALUES_AT,
)
from engine.kernels.memory import float_at, put_byte, put_float, put_word, take, word_at
from engine.kernels.parts import PART, low_float
from engine.kernels.scalar import F32, product_sum, rounded

_f32 = np.float32

LEAST: Final = _f32(1e-7)  # of a scale


@njit(nogil=True, error_model="numpy")
def packed_group(x, count, top, scales, codes, to):
    """Pack elements that share a scale; x becomes what the codes stand for. Returns 0, or NaN where something is not finite."""
    low, high = _f32(np.inf), _f32(-np.inf)
    for i in range(count):
        v = float_at(x, i)
        low, high = min(low, v), max(high, v)
    from_below = abs(low) > abs(high)
    scale = max(_f32(_f32(high - low) / top), LEAST)
    scale, edge = (scale, low) if from_below else (-scale, high)
    steps, bias = np.rint(_f32(edge / scale)), _f32(0.0)
    if steps != _f32(0.0):
        scale, bias = _f32(edge / steps), edge
    stored_scale, stored_bias = rounded(scale, to), rounded(bias, to)
    sound = _f32(0.0)
    for i in range(count):
        v = float_at(x, i)
        code = min(max(np.rint(_f32(_f32(v - bias) / scale)), _f32(0.0)), top)
        w = rounded(_f32(rounded(_f32(stored_scale * code), to) + stored_bias), to)
        w = product_sum(stored_scale, _f32(code), stored_bias) if to == F32 else w
        put_byte(codes, i, np.int64(code))
        put_float(x, i, w)
        sound = _f32(sound + _f32(_f32(v * _f32(0.0)) + _f32(w * _f32(0.0))))
    put_float(scales, 0, stored_scale)
    put_float(scales, 1, stored_bias)
    return sound


@njit(nogil=True, error_model="numpy")
def moved(source, far, near, out, out_far, out_near, width, columns):
    """Copy a head, `columns` elements of which stand `near` floats apart, and each such run `far` floats behind the last."""
    for run in range((width + columns - 1) // columns):
        for i in range(min(columns, width - run * columns)):
            put_float(out, run * out_far + i * out_near, float_at(source, run * far + i * near))


def build_packing() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """The rows of a call packed where they were stored; pieces are groups of heads of a row."""

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def packing(fields, context, thread, control):
        groups, width, columns = word_at(fields, GROUPS), word_at(fields, HEAD), word_at(fields, COLUMNS)
        blocks, layer, elements = word_at(fields, HEAD_BLOCKS), word_at(fields, LAYER), word_at(fields, ELEMENTS)
        rows, top, shares = word_at(context, ROWS), low_float(fields, TOP), width // word_at(fields, ELEMENTS)
        to = word_at(context, ROUNDING)
        x = word_at(context, SCRATCH) + thread * word_at(context, SCRATCH_SIZE)
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= rows * groups:
                return rows * groups
            position, g = word_at(context, OFFSET) + piece // groups, piece % groups
            slab, place = word_at(word_at(context, SLABS), position // SLAB), position % SLAB
            sound, head = _f32(0.0), layer * groups + g
            for which in range(2):
                if which == 0:
                    near, far = columns, columns * columns
                    kept = slab + (head * width * SLAB + place // columns * columns * width + place % columns) * 4
                else:
                    near, far = 1, columns * SLAB
                    kept = slab + word_at(fields, VALUES_AT) + (head * blocks * SLAB + place) * columns * 4
                mine = (head * SLAB + place) * 2 + which
                scales = slab + word_at(fields, SCALES_AT) + mine * shares * 8
                codes = slab + word_at(fields, CODES_AT) + mine * width
                moved(kept, far, near, x, columns, 1, width, columns)
                for share in range(shares):
                    first = share * elements
                    sound += packed_group(x + first * 4, elements, top, scales + share * 8, codes + first, to)
                moved(x, columns, 1, kept, far, near, width, columns)
            if sound != sound:
                put_word(control, NAN, 1)
            take(control + 8 * DONE, 1)

    return packing
