# ruff: noqa: ANN001, ANN201 - Numba reads these signatures; what is compiled takes numbers only
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,no-any-return,import-untyped"
# mypy: disable-error-code="var-annotated,call-arg,unreachable"
"""The order in which mlx's argpartition leaves indices, which is the order in which experts are summed.

mlx selects by the C++ library's `nth_element`: quickselect with the median of three as the pivot, and an insertion sort of the
last few. Values are compared first, then indices, so no two are equal and the steps are determined.

Guarantees: where the library would give quickselect up for a heap, `partitioned` says so and the order is not to be used.
Values must not be NaN.

Source: Hoare 1961; Musser 1997 (introselect); what mlx returns, to which this is held at every start.
"""

from numba import njit

from engine.kernels.memory import float_at, put_word, word_at

FEW = 3  # these are sorted


@njit(nogil=True, error_model="numpy")
def before(values, a, b):
    """Whether index a comes before index b."""
    x, y = float_at(values, a), float_at(values, b)
    return x < y or (x == y and a < b)


@njit(nogil=True, error_model="numpy")
def swapped(ids, i, j):
    """Exchange two indices."""
    a, b = word_at(ids, i), word_at(ids, j)
    put_word(ids, i, b)
    put_word(ids, j, a)


@njit(nogil=True, error_model="numpy")
def middle(values, ids, i, j, k):
    """Which of three places holds the median."""
    a, b, c = word_at(ids, i), word_at(ids, j), word_at(ids, k)
    if before(values, a, b):
        if before(values, b, c):
            return j
        return k if before(values, a, c) else i
    if before(values, a, c):
        return i
    return k if before(values, b, c) else j


@njit(nogil=True, error_model="numpy")
def divided(values, ids, first, last):
    """Divide first..last-1 by a pivot; where the upper part begins."""
    swapped(ids, first, middle(values, ids, first + 1, first + (last - first) // 2, last - 1))
    pivot, low, high = word_at(ids, first), first + 1, last
    while True:
        while before(values, word_at(ids, low), pivot):
            low += 1
        high -= 1
        while before(values, pivot, word_at(ids, high)):
            high -= 1
        if low >= high:
            return low
        swapped(ids, low, high)
        low += 1


@njit(nogil=True, error_model="numpy")
def partitioned(values, ids, count, nth):
    """Indices 0..count-1 as argpartition leaves them in `ids`; whether it is that order."""
    for i in range(count):
        put_word(ids, i, i)
    first, last, left = 0, count, 0
    while count >> (left + 1):
        left += 1
    left *= 2
    while last - first > FEW:
        if left == 0:
            return False
        left -= 1
        cut = divided(values, ids, first, last)
        if cut <= nth:
            first = cut
        else:
            last = cut
    for i in range(first + 1, last):
        index, j = word_at(ids, i), i
        while j > first and before(values, index, word_at(ids, j - 1)):
            put_word(ids, j, word_at(ids, j - 1))
            j -= 1
        put_word(ids, j, index)
    return True
