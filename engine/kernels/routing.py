# ruff: noqa: ANN001, ANN201, ANN202, ARG001 - Numba reads these signatures; what is compiled takes numbers only
# ruff: noqa: PLR0124 - a NaN is what differs from itself
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,no-any-return,import-untyped"
# mypy: disable-error-code="var-annotated,call-arg,unreachable"
"""Experts of a step: which rows go to which, their products, and the weighted sum of what they give, as parts of a step.

Guarantees: those of `engine.kernels.parts`. How many pieces a part has depends on the call's rows alone, not on what was
chosen: a thread that comes late may read what a later layer has chosen, and must find no piece. Scores that are not finite, and
a choice that mlx would make in another way (`engine.kernels.partition`), mark a NaN.

Numerics: the softmax of `engine.kernels.attending`; shares are divided and outputs multiplied with a rounding each, and both
are summed in float32 in the order of the choice, with one rounding at the end.
Source: spec/models.md section 0, rule 9.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from engine.kernels.attending import weighed
from engine.kernels.driver import DONE, NAN, NEXT, SLOTS
from engine.kernels.fields import (
    BIASES,
    BIASES_STEP,
    BLOCKS,
    CHOSEN,
    GATHERED,
    HIGHEST,
    INNER,
    MANY,
    NORMED,
    OUT_STEP,
    OUTPUTS,
    R_BIAS,
    R_CHOSEN,
    R_EXPERTS,
    R_INNER,
    R_KIND,
    R_NORMALISED,
    R_WIDTH,
    ROUNDING,
    ROWS,
    RUN,
    S_WIDTH,
    SCALES,
    SCALES_STEP,
    SCORES,
    SCRATCH,
    SCRATCH_SIZE,
    SHARES,
    SHIFT,
    SUMS,
    TIMES,
    WEIGHT,
    WEIGHT_STEP,
    WIDTH,
    X,
    Y,
)
from engine.kernels.memory import call_product, float_at, put_float, put_word, take, word_at
from engine.kernels.partition import partitioned
from engine.kernels.parts import PART, finished
from engine.kernels.scalar import rounded

RUN_WORDS: Final = 3  # expert, first row, rows

_f32 = np.float32


@njit(nogil=True, error_model="numpy")
def chosen(fields, scores, shares, ids, to):
    """Choose a row's experts, the first of `ids`, and their shares; whether mlx would do the same."""
    many, count, kind = word_at(fields, R_EXPERTS), word_at(fields, R_CHOSEN), word_at(fields, R_KIND)
    finished(scores, word_at(fields, R_BIAS), scores, many, to)
    sound = _f32(0.0)
    for i in range(many):
        sound = _f32(sound + _f32(float_at(scores, i) * _f32(0.0)))
        put_word(ids, i, i)
    if sound != sound:
        return False
    if kind == HIGHEST:
        for i in range(many):
            put_float(scores, i, _f32(-float_at(scores, i)))
        right = partitioned(scores, ids, many, count - 1)
        for j in range(count):
            put_float(shares, j, _f32(-float_at(scores, word_at(ids, j))))
        weighed(shares, count, 0, to)
        return right
    weighed(scores, many, 0, to)
    right = partitioned(scores, ids, many, many - count)
    total = _f32(0.0)
    for j in range(count):
        put_word(ids, j, word_at(ids, many - count + j))
        put_float(shares, j, float_at(scores, word_at(ids, j)))
        total = _f32(total + float_at(shares, j))
    total = rounded(total, to)
    if word_at(fields, R_NORMALISED):
        for j in range(count):
            put_float(shares, j, rounded(_f32(float_at(shares, j) / total), to))
    return right


@njit(nogil=True, error_model="numpy")
def in_runs(table, places, many, count):
    """Put choices in order of their expert: runs into the table, and for each choice, in the place of its expert, its row."""
    runs = slot = 0
    for expert in range(many):
        first = slot
        for i in range(count):
            if word_at(places, i) == expert:
                put_word(places, i, -1 - slot)
                slot += 1
        if slot > first:
            put_word(table, 1 + RUN_WORDS * runs, expert)
            put_word(table, 2 + RUN_WORDS * runs, first)
            put_word(table, 3 + RUN_WORDS * runs, slot - first)
            runs += 1
    put_word(table, 0, runs)
    for i in range(count):
        put_word(places, i, -1 - word_at(places, i))


@njit(nogil=True, error_model="numpy")
def places_at(table, rows, many, count):
    """Where the rows of choices stand in the table."""
    return table + 8 * (1 + RUN_WORDS * min(many, rows * count))


def build_routing() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """SHARES, CHOSEN and GATHERED from SCORES and NORMED; one piece."""

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def routing(fields, context, thread, control):
        if take(control + 8 * NEXT, 1):
            return 1
        rows, to = word_at(context, ROWS), word_at(context, ROUNDING)
        many, count, width = word_at(fields, R_EXPERTS), word_at(fields, R_CHOSEN), word_at(fields, R_INNER)
        table = word_at(context, CHOSEN)
        places = places_at(table, rows, many, count)
        ids = places + 8 * rows * count
        for row in range(rows):
            scores = word_at(context, SCORES) + row * word_at(fields, R_WIDTH) * 4
            if not chosen(fields, scores, word_at(context, SHARES) + row * count * 4, ids, to):
                put_word(control, NAN, 1)
            for j in range(count):
                put_word(places, row * count + j, word_at(ids, j))
        in_runs(table, places, many, rows * count)
        for i in range(rows * count):
            source = word_at(context, NORMED) + i // count * width * 4
            target = word_at(context, GATHERED) + word_at(places, i) * width * 4
            for j in range(width):
                put_float(target, j, float_at(source, j))
        take(control + 8 * DONE, 1)
        return 1

    return routing


def build_expert_product() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """Y = X times the matrix of each row's expert; pieces are blocks of columns of a run."""

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def expert_product(fields, context, thread, control):
        rows, blocks = word_at(context, ROWS), word_at(fields, BLOCKS)
        pieces = min(word_at(fields, MANY), rows * word_at(fields, TIMES)) * blocks
        mine = word_at(context, SCRATCH) + thread * word_at(context, SCRATCH_SIZE)
        inner, width, table = word_at(fields, INNER), word_at(fields, WIDTH), word_at(context, CHOSEN)
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= pieces:
                return pieces
            run, block = piece // blocks, piece % blocks
            if run < word_at(table, 0):
                at = table + 8 * (1 + RUN_WORDS * run)
                first, column = word_at(at, 1), word_at(at, 0) * blocks + block
                for i in range(SLOTS):
                    put_word(mine, i, 0)
                call_product(
                    word_at(fields, RUN),
                    word_at(context, word_at(fields, X)) + first * inner * 4,
                    word_at(at, 2),
                    inner,
                    word_at(fields, WEIGHT) + column * word_at(fields, WEIGHT_STEP),
                    word_at(fields, SCALES) + column * word_at(fields, SCALES_STEP),
                    word_at(fields, BIASES) + column * word_at(fields, BIASES_STEP),
                    word_at(fields, SHIFT),
                    word_at(context, word_at(fields, Y)) + first * width * 4 + block * word_at(fields, OUT_STEP),
                    width,
                    1,
                    mine,
                )
                if word_at(mine, NAN):
                    put_word(control, NAN, 1)
            take(control + 8 * DONE, 1)

    return expert_product


def build_expert_sum() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """SUMS = the sum of each row's OUTPUTS, each times its share, unrounded like a product's; pieces are rows."""

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def expert_sum(fields, context, thread, control):
        rows, to = word_at(context, ROWS), word_at(context, ROUNDING)
        count, width = word_at(fields, R_CHOSEN), word_at(fields, R_INNER)
        while True:
            row = take(control + 8 * NEXT, 1)
            if row >= rows:
                return rows
            out = word_at(context, SUMS) + row * width * 4
            places = places_at(word_at(context, CHOSEN), rows, word_at(fields, R_EXPERTS), count)
            for i in range(width):
                put_float(out, i, _f32(-0.0) if count == 1 else _f32(0.0))  # a sum of one keeps the sign of a zero
            for j in range(row * count, (row + 1) * count):
                x = word_at(context, OUTPUTS) + word_at(places, j) * word_at(fields, S_WIDTH) * 4
                share = float_at(word_at(context, SHARES), j)
                for i in range(width):
                    part = rounded(_f32(rounded(float_at(x, i), to) * share), to)
                    put_float(out, i, _f32(float_at(out, i) + part))
            take(control + 8 * DONE, 1)

    return expert_sum
