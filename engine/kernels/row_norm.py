# ruff: noqa: ANN001, ANN202, ARG001 - Numba reads these signatures; what is compiled takes numbers only
# mypy: disable-error-code="untyped-decorator,no-untyped-def,import-untyped,no-any-return,no-untyped-call"
# mypy: disable-error-code="call-arg,var-annotated,unreachable"
"""A norm of all heads at once: of a whole row of queries or of keys, before it is cut into heads, as a part of a step.

Guarantees: those of `engine.kernels.parts`. The row is normalised in place, bias and rounding of the product included;
finishing it again, without a bias, changes nothing.

Numerics: those of `engine.kernels.parts.normed`.
"""

from typing import Any

from numba import njit

from engine.kernels.driver import DONE, NEXT
from engine.kernels.fields import BIAS, N_EPS, N_INNER, N_INVERSE, N_WEIGHT, ROUNDING, ROWS, X_WIDTH, X
from engine.kernels.memory import take, word_at
from engine.kernels.parts import PART, finished, low_float, normed


def build_row_norm() -> Any:  # noqa: ANN401 - Numba's dispatcher
    """X = norm of (X + bias); pieces are rows."""

    @njit(PART, cache=True, nogil=True, error_model="numpy")
    def row_norm(fields, context, thread, control):
        rows, width, to = word_at(context, ROWS), word_at(fields, N_INNER), word_at(context, ROUNDING)
        inverse, eps = low_float(fields, N_INVERSE), low_float(fields, N_EPS)
        while True:
            row = take(control + 8 * NEXT, 1)
            if row >= rows:
                return rows
            x = word_at(context, word_at(fields, X)) + row * word_at(fields, X_WIDTH) * 4
            finished(x, word_at(fields, BIAS), x, width, to)
            normed(x, word_at(fields, N_WEIGHT), x, width, inverse, eps, to)
            take(control + 8 * DONE, 1)

    return row_norm
