# ruff: noqa: ANN001, ANN201, ANN202, ANN401, ARG001, PLR0917 - Numba reads these signatures; what is compiled takes integers
# ruff: noqa: C901, PLR0912, PLR0915 - one compiled function: what it would call could not be kept on disk
# mypy: disable-error-code="attr-defined,call-arg,var-annotated,unreachable,import-untyped"
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return,no-untyped-call"
"""Attention of a step: each query to the keys that it sees, by the tiles of products, without a matrix of all scores.

Guarantees: those of `engine.kernels.parts`. Only positions that some query of a piece sees are read; a piece holds its queries'
scores and no more. Positions that a query does not see weigh +0 and change no sum, as long as their values are finite, which is
looked at when they are stored.

Numerics: scores are float32 sums in order of the element, rounded; over packed heads, after each product and each sum. The
softmax is float32 throughout, its sum in the order of the cache (a ring's order is that of its places), its result rounded;
then such sums again, in the same order. Scores so low that what mlx puts in the place of hidden ones could weigh anything are
left to mlx.
Source: spec/cpu.md section 1; spec/kv.md section 2 (order of a ring).
"""

from typing import Any, Final

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.driver import DONE, NAN, NEXT
from engine.kernels.fields import (
    ATTENDED,
    CAP,
    COLUMNS,
    GROUP,
    GROUPS,
    HEAD,
    HEAD_BLOCKS,
    LAYER,
    OFFSET,
    RING,
    RINGS,
    ROUNDING,
    ROWS,
    SCRATCH,
    SCRATCH_SIZE,
    SLAB,
    SLABS,
    TURNED,
    VALUES_AT,
    WINDOW,
)
from engine.kernels.memory import float_at, put_float, put_word, take, word_at
from engine.kernels.parts import PART, low_float
from engine.kernels.scalar import F32, exponential, rounded
from engine.kernels.soft_cap import capped
from engine.kernels.symbols import named
from engine.kernels.tile import STORED, UNROLL, literal_values
from engine.kernels.vector_code import Shape, Value, VectorCode

QUERIES_A_PIECE: Final = 48  # rows of one piece, where there are as many
LOWEST: Final = np.float32(
    -60000.0
)  # below the lowest finite float16, less what the exponential of a difference can bear

_f32 = np.float32


@intrinsic(prefer_literal=True)
def resumed_tile(
    _typing: Any,
    lanes: Any,
    vectors: Any,
    rows: Any,
    rounding: Any,
    x: Any,
    stride: Any,
    valid: Any,
    weight: Any,
    inner: Any,
    y: Any,
    width: Any,
    nan: Any,
) -> Any:
    """A tile over float32 weights whose sums go on from what y holds; the arguments are those of `dense_tile`.

    Products and sums are rounded to `rounding`, an index into `STORED`.
    """
    literals = literal_values(lanes, vectors, rows, rounding)
    if literals is None:
        return None
    shape, to = Shape(lanes=literals[0], vectors=literals[1], rows=literals[2]), STORED[literals[3]]

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, stride, valid, weight, inner, y, width, nan = args[4:]
        code = VectorCode(builder, shape)
        inputs = code.row_addresses(x, stride, valid)

        def body(k: Value, sums: list[Value]) -> list[Value]:
            loaded = code.vectors(builder.add(weight, builder.mul(k, code.i64(4 * shape.columns))), code.floats)
            return [
                total
                for r in range(shape.rows)
                for xv in [[code.spread(inputs[r], k)] * shape.vectors]
                for total in code.multiply_adds(xv, loaded, sums[r * shape.vectors : (r + 1) * shape.vectors], to)
            ]

        outputs = code.row_addresses(y, width, valid)
        sums = [v for out in outputs for v in code.vectors(builder.ptrtoint(out, inner.type), code.floats)]
        turn = UNROLL if shape.rows == 1 else 1
        whole = builder.and_(inner, code.i64(-turn))
        sums = code.loop(code.i64(0), whole, turn, sums, body)
        if turn > 1:
            sums = code.loop(whole, inner, 1, sums, body)
        code.store_rows(y, width, valid, nan, sums)
        return context.get_dummy_value()

    return types.void(lanes, vectors, rows, rounding, *[types.int64] * 8), generate


@njit(nogil=True, error_model="numpy")
def weighed(scores, count, first, to):
    """The softmax of a row in place, its sum beginning at element `first` and going round; the largest score."""
    a = b = c = d = _f32(-np.inf)
    i = 0
    while i + 4 <= count:
        a, b = max(a, rounded(float_at(scores, i), to)), max(b, rounded(float_at(scores, i + 1), to))
        c, d = max(c, rounded(float_at(scores, i + 2), to)), max(d, rounded(float_at(scores, i + 3), to))
        i += 4
    while i < count:
        a = max(a, rounded(float_at(scores, i), to))
        i += 1
    most = max(a, b, c, d)
    for i in range(count):
        put_float(scores, i, exponential(_f32(rounded(float_at(scores, i), to) - most)))
    total = _f32(0.0)
    for i in range(first, count):
        total = _f32(total + float_at(scores, i))
    for i in range(first):
        total = _f32(total + float_at(scores, i))
    factor = _f32(_f32(1.0) / total)
    for i in range(count):
        put_float(scores, i, rounded(_f32(float_at(scores, i) * factor), to))
    return most


@njit(nogil=True, error_model="numpy")
def cleared(row, start, stop):
    """Zeros."""
    for i in range(start, stop):
        put_float(row, i, _f32(0.0))


def build_attention(shape: Shape, rounding: int = F32) -> Any:
    """ATTENDED [row][head] = attention of TURNED; pieces are heads of one row, or runs of rows of a group of heads.

    `rounding`, an index into `STORED`, is what every operation of a product rounds to: in 16 bits that of packed heads.
    """
    lanes, vectors, at_once = shape.lanes, shape.vectors, shape.rows

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    @named(f"attention_{STORED[rounding]}")
    def attention(fields, context, thread, control):
        groups, group, width = word_at(fields, GROUPS), word_at(fields, GROUP), word_at(fields, HEAD)
        columns, blocks, layer = word_at(fields, COLUMNS), word_at(fields, HEAD_BLOCKS), word_at(fields, LAYER)
        window, to = word_at(fields, WINDOW), word_at(context, ROUNDING)
        rows, offset, slabs = word_at(context, ROWS), word_at(context, OFFSET), word_at(context, SLABS)
        scratch = word_at(context, SCRATCH) + thread * word_at(context, SCRATCH_SIZE)
        nan, wide = control + 8 * NAN, blocks * columns
        queries = max(1, QUERIES_A_PIECE // group)
        runs = (rows + queries - 1) // queries
        pieces = groups * group if rows == 1 else groups * runs
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= pieces:
                return pieces
            piece = pieces - 1 - piece  # the longest first
            held = index = 0
            if rows == 1:
                g, first, count = piece // group, 0, 1
                x = word_at(context, TURNED) + piece * width * 4
                if word_at(fields, RING) >= 0:
                    ring = word_at(context, RINGS) + 16 * word_at(fields, RING)
                    held, index = word_at(ring, 0), word_at(ring, 1)
            else:
                g, first = piece % groups, piece // groups * queries
                count = min(queries, rows - first) * group
                x = word_at(context, TURNED) + (g * rows + first) * group * width * 4
            last = offset + first + (count - 1) // group
            begin = 0
            if held:
                begin = offset + 1 - held
            elif window:
                begin = max(0, offset + first + 1 - window)
            start = begin // columns * columns
            stride = (last // columns + 1) * columns - start
            out = scratch + count * stride * 4
            mine = (layer * groups + g) * width * SLAB
            for at in range(start, last + 1, columns):
                keys = word_at(slabs, at // SLAB) + (mine + at % SLAB * width) * 4
                y = scratch + (at - start) * 4
                cleared_rows(y, count, stride, columns)
                if count == 1:
                    resumed_tile(lanes, vectors, 1, rounding, x, width, 1, keys, width, y, stride, nan)
                else:
                    for row in range(0, count, at_once):
                        valid, into = min(at_once, count - row), y + row * stride * 4
                        head = x + row * width * 4
                        resumed_tile(
                            lanes, vectors, at_once, rounding, head, width, valid, keys, width, into, stride, nan
                        )
            for row in range(count):
                position = offset + first + row // group
                lowest = begin
                if window and not held:
                    lowest = max(0, position + 1 - window)
                scores = scratch + row * stride * 4
                cleared(scores, 0, lowest - start)
                if word_at(fields, CAP):
                    capped(scores + (lowest - start) * 4, position + 1 - lowest, low_float(fields, CAP), to)
                most = weighed(scores + (lowest - start) * 4, position + 1 - lowest, held - index, to)
                if not most > LOWEST:
                    put_word(control, NAN, 1)
                cleared(scores, position + 1 - start, last + 1 - start)
            cleared(out, 0, count * wide)
            for part in range(2 if held > index else 1):
                at, end = start, last + 1
                if held > index:
                    at = last + 1 - index if part == 0 else begin
                    end = last + 1 if part == 0 else last + 1 - index
                while at < end:
                    stop = min(end, (at // SLAB + 1) * SLAB)
                    for block in range(blocks):
                        values = word_at(slabs, at // SLAB) + word_at(fields, VALUES_AT)
                        values += (((layer * groups + g) * blocks + block) * SLAB + at % SLAB) * columns * 4
                        p, into, inner = scratch + (at - start) * 4, out + block * columns * 4, stop - at
                        if count == 1:
                            resumed_tile(lanes, vectors, 1, rounding, p, stride, 1, values, inner, into, wide, nan)
                        else:
                            for row in range(0, count, at_once):
                                valid, a, b = min(at_once, count - row), p + row * stride * 4, into + row * wide * 4
                                resumed_tile(
                                    lanes, vectors, at_once, rounding, a, stride, valid, values, inner, b, wide, nan
                                )
                    at = stop
            for row in range(count):
                query = (first + row // group) * groups * group + g * group + row % group
                if rows == 1:
                    query = piece
                into = word_at(context, ATTENDED) + query * width * 4
                for i in range(width):
                    put_float(into, i, rounded(float_at(out, row * wide + i), to))
            take(control + 8 * DONE, 1)

    return attention


@njit(nogil=True, error_model="numpy")
def cleared_rows(y, rows, stride, columns):
    """Zeros in a block of columns."""
    for row in range(rows):
        for i in range(columns):
            put_float(y, row * stride + i, _f32(0.0))


def scratch_floats(*, rows: int, positions: int, group: int, head_blocks: int, columns: int) -> int:
    """Floats that a thread needs at most."""
    queries = min(max(1, QUERIES_A_PIECE // group), rows) * group
    return queries * ((positions // columns + 2) * columns + head_blocks * columns)
