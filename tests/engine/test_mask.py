"""Which positions a query may see, against a plain loop over queries and keys."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.plain import PlainCache
from engine.cache.quantized import QuantizedCache, pack
from engine.mask import causal_matrix


def by_loops(L: int, before: int, window: int | None) -> list[list[bool]]:
    """A query at position q sees itself and what came before it, less what is a whole window away."""
    return [
        [k <= q and (window is None or q - k < window) for k in range(before + L)] for q in range(before, before + L)
    ]


@given(L=st.integers(1, 12), before=st.integers(0, 20), window=st.none() | st.integers(1, 25))
def test_a_matrix_is_its_definition(L: int, before: int, window: int | None) -> None:
    matrix = causal_matrix(L, before=before, window=window)
    assert matrix.dtype == mx.bool_
    assert matrix.tolist() == by_loops(L, before, window)


def test_the_traced_window() -> None:
    # spec/kv.md section 2: three queries after five positions, window 6
    rows = causal_matrix(3, before=5, window=6).astype(mx.int32).tolist()
    assert ["".join(map(str, row)) for row in rows] == ["11111100", "01111110", "00111111"]


@given(L=st.integers(1, 12), before=st.integers(0, 20), window=st.integers(1, 25))
def test_every_query_sees_itself_and_at_most_its_window(L: int, before: int, window: int) -> None:
    matrix = causal_matrix(L, before=before, window=window)
    for i, row in enumerate(matrix.tolist()):
        assert row[before + i]
        assert sum(row) == min(window, before + i + 1)


# the masks of caches that keep every position


def growing(length: int, *, packed: bool) -> PlainCache | QuantizedCache:
    new = mx.zeros((1, 1, length, 32))
    if packed:
        heads = pack(new, bits=8, group_size=32)
        return QuantizedCache(keys=heads, values=heads, offset=length)
    return PlainCache().append(new, new)[0]


kinds = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])


@kinds
@pytest.mark.parametrize("length", [1, 7])
def test_without_a_window_one_query_needs_no_mask_and_several_are_causal(length: int, packed: bool) -> None:
    cache = growing(length, packed=packed)
    assert (cache.mask(1), cache.mask(2), cache.mask(300)) == (None, "causal", "causal")
    assert cache.mask(1, as_array=True) is None


@kinds
def test_a_matrix_that_was_asked_for_stands_for_the_word(packed: bool) -> None:
    mask = growing(7, packed=packed).mask(3, as_array=True)
    assert isinstance(mask, mx.array)
    assert mask.tolist() == by_loops(3, 7, None)


@kinds
@pytest.mark.parametrize("L", [1, 3])
@pytest.mark.parametrize("as_array", [False, True])
def test_a_window_is_a_matrix_even_for_one_query(L: int, packed: bool, as_array: bool) -> None:
    mask = growing(7, packed=packed).mask(L, window=4, as_array=as_array)
    assert isinstance(mask, mx.array)
    assert mask.tolist() == by_loops(L, 7, 4)
