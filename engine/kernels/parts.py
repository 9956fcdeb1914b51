# ruff: noqa: ANN001, ANN201, ANN202, ARG001, PLR0917 - Numba reads these signatures; what is compiled takes numbers only
# ruff: noqa: PLR0124 - a NaN is what differs from itself
# mypy: disable-error-code="attr-defined,call-arg,var-annotated,unreachable,import-untyped"
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return,no-untyped-call"
"""The parts of a step besides products and attention: norms, rotation and storing of keys, the gated activation.

A part is compiled code that threads call together, `part(fields, context, thread, control)`: it hands out its pieces one by one
through the control words and returns how many there are in all. What it is told stands in `engine.kernels.fields`.

Guarantees: every piece is done by one thread; a thread that comes late finds none and touches nothing. Sums of products arrive
unrounded and without bias; the part that reads them adds the bias and rounds, as mlx's product would have. A NaN, or an
infinite value of attention, is marked in the control words, and the whole call is mlx's then.

Numerics: each operation is mlx's, in mlx's order, rounded to the activations' dtype where mlx rounds.
Source: spec/cpu.md section 1.
"""

import math
from typing import Any, Final

import numpy as np
from numba import njit, types

from engine.kernels.driver import DONE, NAN, NEXT
from engine.kernels.fields import (
    A_INNER,
    ACTIVATION,
    BIAS,
    COLUMNS,
    FRESH,
    GAIN,
    GATE,
    GATE_BIAS,
    GATE_WIDTH,
    GATED,
    GEGLU_APPROX,
    GROUP,
    GROUPS,
    H_EPS,
    H_INVERSE,
    HAS_GAIN,
    HEAD,
    HEAD_BLOCKS,
    K_BIAS,
    K_NORM,
    K_WIDTH,
    KEYS,
    LAYER,
    N_EPS,
    N_INNER,
    N_INVERSE,
    N_WEIGHT,
    NEIGHBOURS,
    OFFSET,
    POST,
    POST_EPS,
    Q_BIAS,
    Q_NORM,
    Q_WIDTH,
    QUERIES,
    ROUNDING,
    ROWS,
    SCALE,
    SLAB,
    SLABS,
    STREAM,
    TABLE,
    TURNED,
    TURNING,
    UP,
    UP_BIAS,
    UP_WIDTH,
    V_BIAS,
    V_WIDTH,
    VALUES,
    VALUES_AT,
    X_WIDTH,
    X,
    Y,
)
from engine.kernels.memory import float_at, put_float, put_word, take, word_at
from engine.kernels.scalar import exponential, rounded

PART: Final = types.int64(*[types.int64] * 4)
PIECE: Final = 512  # elements of an activation that are worth handing out

_f32 = np.float32

CUBIC: Final = _f32(0.044715)
ROOT: Final = _f32(math.sqrt(2 / math.pi))
_powf = types.ExternalFunction("powf", types.float32(types.float32, types.float32))
_tanhf = types.ExternalFunction("tanhf", types.float32(types.float32))


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
    """gelu_approx(gate) * up of some elements; the power and the hyperbolic tangent are the C library's."""
    cubic, root, half = rounded(CUBIC, to), rounded(ROOT, to), _f32(0.5)
    for i in range(count):
        g = float_at(gate, i)
        cube = rounded(_powf(g, _f32(3.0)), to)
        inner = rounded(_f32(root * rounded(_f32(g + rounded(_f32(cubic * cube), to)), to)), to)
        factor = rounded(_f32(_f32(1.0) + rounded(_tanhf(inner), to)), to)
        gelu = rounded(_f32(rounded(_f32(half * g), to) * factor), to)
        put_float(out, i, rounded(_f32(gelu * float_at(up, i)), to))


def build_norm() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """STREAM += [norm of] X, Y = norm of STREAM; pieces are rows."""

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
                for i in range(width):
                    put_float(stream, i, rounded(_f32(float_at(stream, i) + float_at(x, i)), to))
            out = word_at(context, word_at(fields, Y)) + row * width * 4
            nan = normed(stream, word_at(fields, N_WEIGHT), out, width, inverse, low_float(fields, N_EPS), to)
            if nan:
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
                x = word_at(context, QUERIES) + (row * word_at(fields, Q_WIDTH) + h * width) * 4
                out = word_at(context, TURNED) + ((g * rows + row) * group + h - g * group) * width * 4
                bias = word_at(fields, Q_BIAS)
                head(fields, context, x, bias + h * width * 4 if bias else 0, word_at(fields, Q_NORM), out, position)
                multiplied(out, scale, width, to)
            slab, place = word_at(word_at(context, SLABS), position // SLAB), position % SLAB
            x = word_at(context, KEYS) + (row * word_at(fields, K_WIDTH) + g * width) * 4
            key = word_at(context, FRESH) + (row * groups + g) * width * 4
            bias = word_at(fields, K_BIAS)
            head(fields, context, x, bias + g * width * 4 if bias else 0, word_at(fields, K_NORM), key, position)
            kept = (
                slab + ((layer * groups + g) * width * SLAB + place // columns * columns * width + place % columns) * 4
            )
            for i in range(width):
                put_float(kept, i * columns, float_at(key, i))
            x = word_at(context, VALUES) + (row * word_at(fields, V_WIDTH) + g * width) * 4
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


def build_gate() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """Y = activation(GATE) * UP; pieces are runs of elements of a row."""

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def gate(fields, context, thread, control):
        rows, width, to = word_at(context, ROWS), word_at(fields, A_INNER), word_at(context, ROUNDING)
        runs = (width + PIECE - 1) // PIECE
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= rows * runs:
                return rows * runs
            row, start = piece // runs, piece % runs * PIECE
            count = min(width - start, PIECE)
            g = word_at(context, GATE) + (row * word_at(fields, GATE_WIDTH) + start) * 4
            u = word_at(context, UP) + (row * word_at(fields, UP_WIDTH) + start) * 4
            out = word_at(context, GATED) + (row * width + start) * 4
            bias = word_at(fields, GATE_BIAS)
            finished(g, bias + start * 4 if bias else 0, g, count, to)
            bias = word_at(fields, UP_BIAS)
            finished(u, bias + start * 4 if bias else 0, u, count, to)
            if word_at(fields, ACTIVATION) == GEGLU_APPROX:
                normal_gate(g, u, out, count, to)
            else:
                logistic_gate(g, u, out, count, to)
            take(control + 8 * DONE, 1)

    return gate
