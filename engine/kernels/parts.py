# ruff: noqa: ANN001, ANN201, ANN202, ARG001, PLR0917 - Numba reads these signatures; what is compiled takes numbers only
# ruff: noqa: PLR0124 - a NaN is what differs from itself
# mypy: disable-error-code="attr-defined,call-arg,var-annotated,unreachable,import-untyped"
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return,no-untyped-call"
"""The parts of a step besides products and attention: norms, rotation and storing of keys.

A part is compiled code that threads call together, `part(fields, context, thread, control)`: it hands out its pieces one by one
through the control words and returns how many there are in all. What it is told stands in `engine.kernels.fields`.

Guarantees: every piece is done by one thread; a thread that comes late finds none and touches nothing. Sums of products arrive
unrounded and without bias; the part that reads them adds the bias and rounds, as mlx's product would have. A NaN, or an
infinite value of attention, is marked in the control words, and the whole call is mlx's then.

Numerics: each operation is mlx's, in mlx's order, rounded to the activations' dtype where mlx rounds.
Source: spec/cpu.md section 1.
"""

from typing import Any, Final

import numpy as np
from numba import njit, types

from engine.kernels.driver import DONE, NAN, NEXT
from engine.kernels.fields import (
    ALSO,
    ALSO_BIAS,
    ALSO_WIDTH,
    BIAS,
    COLUMNS,
    FRESH,
    GAIN,
    GROUP,
    GROUPS,
    H_EPS,
    H_INVERSE,
    HAS_GAIN,
    HAS_MULTIPLIER,
    HEAD,
    HEAD_BLOCKS,
    K_AT,
    K_BIAS,
    K_FROM,
    K_NORM,
    K_WIDTH,
    LAYER,
    MULTIPLIER,
    N_EPS,
    N_INNER,
    N_INVERSE,
    N_KIND,
    N_SHIFT,
    N_WEIGHT,
    NEIGHBOURS,
    NO_NORM,
    OFFSET,
    POST,
    POST_EPS,
    Q_BIAS,
    Q_FROM,
    Q_NORM,
    Q_WIDTH,
    RMS,
    ROUNDING,
    ROWS,
    SCALE,
    SLAB,
    SLABS,
    STREAM,
    TABLE,
    TURNED,
    TURNING,
    V_AT,
    V_BIAS,
    V_FROM,
    V_WIDTH,
    VALUES_AT,
    X_WIDTH,
    X,
    Y,
)
from engine.kernels.memory import float_at, put_float, put_word, take, word_at
from engine.kernels.scalar import rounded

PART: Final = types.int64(*[types.int64] * 4)

_f32 = np.float32


@njit(nogil=True, error_model="numpy")
def low_float(fields, index):
    """The float32 in the low half of a word."""
    return float_at(fields, 2 * index)


@njit(nogil=True, error_model="numpy")
def finished(x, bias, out, width, to):
    """Sums of a product as mlx's product gives them: with the bias, rounded. `out` may be `x`."""
    if bias:
        for i in range(width):
            put_float(out, i, rounded(_f32(float_at(x, i) + float_at(bias, i)), to))
    else:
        for i in range(width):
            put_float(out, i, rounded(float_at(x, i), to))


@njit(nogil=True, error_model="numpy")
def normed(x, weight, out, width, inverse, eps, to):
    """The root-mean-square norm of a row; `out` may be `x`. Returns how many elements of it are NaN."""
    total = _f32(0.0)
    for i in range(width):
        v = float_at(x, i)
        total = _f32(total + _f32(v * v))
    factor = _f32(_f32(1.0) / np.sqrt(_f32(_f32(total * inverse) + eps)))
    nan = 0
    for i in range(width):
        v = rounded(_f32(rounded(_f32(float_at(x, i) * factor), to) * float_at(weight, i)), to)
        nan += v != v
        put_float(out, i, v)
    return nan


@njit(nogil=True, error_model="numpy")
def centred(x, weight, shift, out, width, inverse, eps, to):
    """The norm by mean and variance of a row. Returns how many elements of it are NaN."""
    total = _f32(0.0)
    for i in range(width):
        total = _f32(total + float_at(x, i))
    mean, total = _f32(total * inverse), _f32(0.0)
    for i in range(width):
        v = _f32(float_at(x, i) - mean)
        total = _f32(total + _f32(v * v))
    factor = _f32(_f32(1.0) / np.sqrt(_f32(_f32(total * inverse) + eps)))
    nan = 0
    for i in range(width):
        v = rounded(_f32(_f32(float_at(x, i) - mean) * factor), to)
        v = rounded(_f32(v * float_at(weight, i)), to)
        if shift:
            v = rounded(_f32(v + float_at(shift, i)), to)
        nan += v != v
        put_float(out, i, v)
    return nan


@njit(nogil=True, error_model="numpy")
def copied(x, out, width):
    """A row as it is. Returns how many elements of it are NaN."""
    nan = 0
    for i in range(width):
        v = float_at(x, i)
        nan += v != v
        put_float(out, i, v)
    return nan


@njit(nogil=True, error_model="numpy")
def normed_as(fields, x, out, to):
    """The norm of a row that a part has. Returns how many elements of it are NaN."""
    width, weight, kind = word_at(fields, N_INNER), word_at(fields, N_WEIGHT), word_at(fields, N_KIND)
    inverse, eps = low_float(fields, N_INVERSE), low_float(fields, N_EPS)
    if kind == RMS:
        return normed(x, weight, out, width, inverse, eps, to)
    if kind == NO_NORM:
        return copied(x, out, width)
    return centred(x, weight, word_at(fields, N_SHIFT), out, width, inverse, eps, to)


@njit(nogil=True, error_model="numpy")
def added(x, y, width, to):
    """x += y."""
    for i in range(width):
        put_float(x, i, rounded(_f32(float_at(x, i) + float_at(y, i)), to))


@njit(nogil=True, error_model="numpy")
def turned(x, cosines, sines, pairs, far, step, to):
    """Rotate pairs (i * step, i * step + far) of a head in place."""
    for i in range(pairs):
        c, s = float_at(cosines, i), float_at(sines, i)
        a, b = float_at(x, i * step), float_at(x, i * step + far)
        put_float(x, i * step, rounded(_f32(rounded(_f32(a * c), to) - rounded(_f32(b * s), to)), to))
        put_float(x, i * step + far, rounded(_f32(rounded(_f32(a * s), to) + rounded(_f32(b * c), to)), to))


@njit(nogil=True, error_model="numpy")
def multiplied(x, by, width, to):
    """A row times a number, in place."""
    for i in range(width):
        put_float(x, i, rounded(_f32(float_at(x, i) * by), to))


@njit(nogil=True, error_model="numpy")
def head(fields, context, x, bias, norm, out, position):
    """A head's query or key: with its bias, normalised, with the gain, rotated."""
    to, width = word_at(context, ROUNDING), word_at(fields, HEAD)
    finished(x, bias, out, width, to)
    if norm:
        normed(out, norm, out, width, low_float(fields, H_INVERSE), low_float(fields, H_EPS), to)
    table, turning = word_at(fields, TABLE), word_at(fields, TURNING)
    if table:
        if word_at(fields, HAS_GAIN):
            multiplied(out, low_float(fields, GAIN), turning, to)
        pairs = turning // 2
        cosines = word_at(context, table) + position * pairs * 4
        sines = word_at(context, table + 1) + position * pairs * 4
        if word_at(fields, NEIGHBOURS):
            turned(out, cosines, sines, pairs, 1, 2, to)
        else:
            turned(out, cosines, sines, pairs, pairs, 1, to)


def build_norm() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """STREAM += what X holds, Y = norm of STREAM; pieces are rows."""

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def norm(fields, context, thread, control):
        rows, width, to = word_at(context, ROWS), word_at(fields, N_INNER), word_at(context, ROUNDING)
        inverse, post = low_float(fields, N_INVERSE), word_at(fields, POST)
        while True:
            row = take(control + 8 * NEXT, 1)
            if row >= rows:
                return rows
            stream = word_at(context, STREAM) + row * width * 4
            if word_at(fields, X):
                x = word_at(context, word_at(fields, X)) + row * word_at(fields, X_WIDTH) * 4
                finished(x, word_at(fields, BIAS), x, width, to)
                if post:
                    normed(x, post, x, width, inverse, low_float(fields, POST_EPS), to)
                if word_at(fields, HAS_MULTIPLIER):
                    multiplied(x, low_float(fields, MULTIPLIER), width, to)
                if word_at(fields, ALSO):
                    y = word_at(context, word_at(fields, ALSO)) + row * word_at(fields, ALSO_WIDTH) * 4
                    finished(y, word_at(fields, ALSO_BIAS), y, width, to)
                    added(x, y, width, to)
                added(stream, x, width, to)
            if normed_as(fields, stream, word_at(context, word_at(fields, Y)) + row * width * 4, to):
                put_word(control, NAN, 1)
            take(control + 8 * DONE, 1)

    return norm


def build_rotation() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """Queries rotated and scaled, to TURNED [group][row][head]; keys and values stored; pieces are groups of a row.

    Keys go to [layer][group][block of positions][element][position], so that positions are columns of a product; values to
    [layer][group][block of elements][position][element].
    """

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def rotation(fields, context, thread, control):
        groups, group, width = word_at(fields, GROUPS), word_at(fields, GROUP), word_at(fields, HEAD)
        columns, blocks, layer = word_at(fields, COLUMNS), word_at(fields, HEAD_BLOCKS), word_at(fields, LAYER)
        rows, to, scale = word_at(context, ROWS), word_at(context, ROUNDING), low_float(fields, SCALE)
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= rows * groups:
                return rows * groups
            row, g = piece // groups, piece % groups
            position = word_at(context, OFFSET) + row
            for h in range(g * group, (g + 1) * group):
                x = word_at(context, word_at(fields, Q_FROM)) + (row * word_at(fields, Q_WIDTH) + h * width) * 4
                out = word_at(context, TURNED) + ((g * rows + row) * group + h - g * group) * width * 4
                bias = word_at(fields, Q_BIAS)
                head(fields, context, x, bias + h * width * 4 if bias else 0, word_at(fields, Q_NORM), out, position)
                multiplied(out, scale, width, to)
            slab, place = word_at(word_at(context, SLABS), position // SLAB), position % SLAB
            x = word_at(context, word_at(fields, K_FROM))
            x += (row * word_at(fields, K_WIDTH) + word_at(fields, K_AT) + g * width) * 4
            key = word_at(context, FRESH) + (row * groups + g) * width * 4
            bias = word_at(fields, K_BIAS)
            head(fields, context, x, bias + g * width * 4 if bias else 0, word_at(fields, K_NORM), key, position)
            kept = (
                slab + ((layer * groups + g) * width * SLAB + place // columns * columns * width + place % columns) * 4
            )
            for i in range(width):
                put_float(kept, i * columns, float_at(key, i))
            x = word_at(context, word_at(fields, V_FROM))
            x += (row * word_at(fields, V_WIDTH) + word_at(fields, V_AT) + g * width) * 4
            bias = word_at(fields, V_BIAS)
            finished(x, bias + g * width * 4 if bias else 0, x, width, to)
            kept = slab + word_at(fields, VALUES_AT) + ((layer * groups + g) * blocks * SLAB + place) * columns * 4
            sound = _f32(0.0)
            for i in range(width):
                v = float_at(x, i)
                sound = _f32(sound + _f32(v * _f32(0.0)))
                put_float(kept, i // columns * columns * SLAB + i % columns, v)
            if sound != sound:
                put_word(control, NAN, 1)
            take(control + 8 * DONE, 1)

    return rotation
