"""The rotating cache against a model of it in plain Python, the traces of the spec, and that it is a value.

The model knows no write index: it says that a single position takes the place of the oldest one that may leave, and that
several positions follow what is left in temporal order.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.rotating import RotatingCache

Check = Callable[..., None]
Normal = Callable[..., mx.array]

patterns = st.lists(st.one_of(st.just(1), st.integers(1, 12)), min_size=1, max_size=25)


def positions(start: int, length: int) -> tuple[mx.array, mx.array]:
    """Keys and values [1, 2, length, 3] whose elements tell the position: keys p, values -p - 1."""
    p = mx.broadcast_to(mx.arange(start, start + length, dtype=mx.float32)[:, None], (1, 2, length, 3))
    return p, -p - 1


def slots(keys: mx.array, values: mx.array) -> list[int]:
    """The positions that were returned, in order, where keys and values of all heads agree on them."""
    order = [int(p) for p in keys[0, 0, :, 0].tolist()]  # type: ignore[union-attr]
    p = mx.broadcast_to(mx.array(order, dtype=mx.float32)[:, None], keys.shape)
    assert keys.tolist() == p.tolist()
    assert values.tolist() == (-p - 1).tolist()
    return order


def modelled(held: Sequence[int], new: Sequence[int], *, max_size: int, keep: int) -> list[int]:
    """What a ring holds after an append, in its order."""
    out = list(held)
    if len(new) > 1:
        out.sort()
        del out[keep : keep + max(0, len(out) - (max_size - 1))]
        return out + list(new)
    del out[keep : keep + max(0, len(out) - max_size)]
    if len(out) < max_size:
        return out + list(new)
    out[out.index(min(out[keep:]))] = new[0]
    return out


# the trace of spec/kv.md section 2


TRACE = [
    # appended, offset, index, capacity, order
    (4, 4, 4, 4, [0, 1, 2, 3]),
    (1, 5, 5, 6, [0, 1, 2, 3, 4]),
    (1, 6, 6, 6, [0, 1, 2, 3, 4, 5]),
    (1, 7, 1, 6, [6, 1, 2, 3, 4, 5]),
    (1, 8, 2, 6, [6, 7, 2, 3, 4, 5]),
    (3, 11, 8, 8, [3, 4, 5, 6, 7, 8, 9, 10]),
    (1, 12, 1, 6, [11, 6, 7, 8, 9, 10]),
    (8, 20, 13, 13, [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]),
    (1, 21, 1, 6, [20, 15, 16, 17, 18, 19]),
]


def test_the_trace_of_the_spec() -> None:
    cache = RotatingCache(max_size=6)
    for length, offset, index, capacity, order in TRACE:
        cache, keys, values = cache.append(*positions(cache.offset, length))
        assert slots(keys, values) == order
        assert (cache.offset, cache.index) == (offset, index)
        assert [array.shape[2] for array in cache.arrays] == [capacity] * 2


def test_the_model_agrees_with_the_trace_of_the_spec() -> None:
    held: list[int] = []
    for length, offset, _, _, order in TRACE:
        held = modelled(held, range(offset - length, offset), max_size=6, keep=0)
        assert held == order


@given(pattern=patterns, max_size=st.integers(2, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_ring_holds_what_the_model_holds_in_its_order(pattern: list[int], max_size: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, max_size - 1), label="keep")
    cache, held = RotatingCache(max_size=max_size, keep=keep), list[int]()
    for count, length in enumerate(pattern, 1):
        held = modelled(held, range(cache.offset, cache.offset + length), max_size=max_size, keep=keep)
        cache, keys, values = cache.append(*positions(cache.offset, length))
        assert slots(keys, values) == held
        assert cache.offset == sum(pattern[:count])
        assert cache.index == held.index(max(held)) + 1


@given(pattern=patterns, max_size=st.integers(2, 9), data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_first_ones_stay_and_the_newest_are_there(pattern: list[int], max_size: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, max_size - 1), label="keep")
    cache = RotatingCache(max_size=max_size, keep=keep)
    for length in pattern:
        cache, keys, values = cache.append(*positions(cache.offset, length))
        seen, end = set(slots(keys, values)), cache.offset
        assert set(range(min(keep, end))) <= seen
        newest = max_size - keep if length == 1 else length
        assert set(range(max(0, end - newest), end)) <= seen
        assert len(seen) <= max_size + (length - 1)


@pytest.mark.parametrize(
    ("max_size", "lengths", "expected"),
    [
        (600, [1, 1], [256, 256]),
        (600, [300, 1], [300, 556]),
        (600, [256, 1, 256, 1, 1], [256, 512, 513, 600, 600]),
        (100, [1, 120, 1], [100, 121, 100]),
        (6, [1, 2, 1], [6, 3, 6]),
    ],
)
def test_a_ring_grows_by_slabs_but_not_past_its_size(max_size: int, lengths: list[int], expected: list[int]) -> None:
    cache, capacities = RotatingCache(max_size=max_size), []
    for length in lengths:
        cache = cache.append(*positions(cache.offset, length))[0]
        capacities.append([array.shape[2] for array in cache.arrays])
    assert capacities == [[size, size] for size in expected]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_bits_are_stored_as_they_come(normal: Normal, same_bits: Check, dtype: mx.Dtype) -> None:
    cache = RotatingCache(max_size=4)
    new = [(normal(2 * i, (2, 3, 1, 5), dtype), normal(2 * i + 1, (2, 3, 1, 5), dtype)) for i in range(7)]
    for piece in new:
        cache, keys, values = cache.append(*piece)
    for which, actual in enumerate((keys, values)):
        same_bits(mx.concatenate([new[i][which] for i in (4, 5, 6, 3)], axis=2), actual)


# a value


@pytest.mark.parametrize("lengths", [[], [3], [4], [4, 1], [4, 1, 1, 1], [9], [9, 1]])
@pytest.mark.parametrize("new", [1, 2, 7])
@pytest.mark.parametrize("keep", [0, 2])
def test_appending_leaves_the_old_cache_as_it_was(same_bits: Check, lengths: list[int], new: int, keep: int) -> None:
    cache = RotatingCache(max_size=5, keep=keep)
    for length in lengths:
        cache = cache.append(*positions(cache.offset, length))[0]
        mx.eval(cache.arrays)
    before, numbers = [mx.array(array) for array in cache.arrays], (cache.offset, cache.index)
    mx.eval(before)
    longer = cache.append(*positions(100, new))[0]
    mx.eval(longer.arrays)
    assert (cache.offset, cache.index) == numbers
    assert len(cache.arrays) == len(before)
    for expected, actual in zip(before, cache.arrays, strict=True):
        same_bits(expected, actual)


@pytest.mark.parametrize("first_evaluated", [True, False])
def test_two_appends_to_one_ring_are_independent_forks(first_evaluated: bool) -> None:
    cache = RotatingCache(max_size=4)
    for length in (4, 1):
        cache = cache.append(*positions(cache.offset, length))[0]
    one, *left = cache.append(*positions(50, 1))
    if first_evaluated:
        mx.eval(one.arrays, left)
    two, *right = cache.append(*positions(60, 1))
    mx.eval(two.arrays, right, one.arrays, left)
    assert (slots(*left), slots(*right)) == ([4, 50, 2, 3], [4, 60, 2, 3])


def test_an_empty_ring_holds_nothing_and_its_kind_names_its_numbers() -> None:
    cache = RotatingCache(max_size=512, keep=4)
    assert (cache.offset, cache.arrays, cache.kind) == (0, (), "rotating-w512-k4")
    longer, _, _ = RotatingCache(max_size=16).append(*positions(0, 3))
    assert longer.kind == "rotating-w16-k0"


# masks


def filled(max_size: int, pattern: Sequence[int]) -> RotatingCache:
    cache = RotatingCache(max_size=max_size)
    for length in pattern:
        cache = cache.append(*positions(cache.offset, length))[0]
    return cache


def test_the_traced_mask_of_several_queries() -> None:
    mask = filled(6, [5]).mask(3)
    assert isinstance(mask, mx.array)
    assert ["".join("01"[seen] for seen in row) for row in mask.tolist()] == [  # type: ignore[union-attr]
        "11111100",
        "01111110",
        "00111111",
    ]


def test_the_traced_mask_of_one_query_is_turned_with_the_ring() -> None:
    cache = filled(8, [8, 1, 1])
    assert (cache.offset, cache.index) == (10, 2)
    mask = cache.mask(1, window=4)
    assert isinstance(mask, mx.array)
    assert mask.tolist() == [True, True, True, False, False, False, False, True]


@pytest.mark.parametrize(
    ("max_size", "pattern", "L", "window", "expected"),
    [
        (6, [], 6, None, "causal"),
        (6, [3], 3, None, "causal"),
        (6, [3], 3, 6, "causal"),
        (6, [3], 1, None, None),
        (6, [9], 1, None, None),
        (6, [9], 1, 6, None),  # the ring itself is the window
        (6, [3], 1, 4, None),  # nothing has left the window yet
    ],
)
def test_what_needs_no_matrix_gets_none(
    *, max_size: int, pattern: list[int], L: int, window: int | None, expected: str | None
) -> None:
    assert filled(max_size, pattern).mask(L, window=window) == expected


@pytest.mark.parametrize(("L", "window"), [(7, None), (4, 3)])
def test_what_outgrows_the_window_gets_a_matrix(L: int, window: int | None) -> None:
    assert isinstance(filled(6, []).mask(L, window=window), mx.array)


@given(
    pattern=st.lists(st.one_of(st.just(1), st.integers(1, 9)), max_size=12),
    max_size=st.integers(2, 8),
    L=st.integers(1, 6),
    as_array=st.booleans(),
    data=st.data(),
)
@settings(max_examples=120, deadline=None)
def test_a_mask_fits_what_append_returns_and_allows_exactly_the_window(
    *, pattern: list[int], max_size: int, L: int, as_array: bool, data: st.DataObject
) -> None:
    window = data.draw(st.none() | st.integers(1, max_size), label="window")
    cache = filled(max_size, pattern)
    mask = cache.mask(L, window=window, as_array=as_array)
    _, keys, values = cache.append(*positions(cache.offset, L))
    held, span = slots(keys, values), window or max_size
    queries = range(cache.offset, cache.offset + L)
    if as_array and L > 1:
        assert isinstance(mask, mx.array)
    if mask is None:
        allowed = [[True] * len(held)] * L
    elif isinstance(mask, str):
        allowed = [[k <= L0 for k in range(len(held))] for L0 in range(len(held) - L, len(held))]
    else:
        allowed = mx.broadcast_to(mask, (L, len(held))).tolist()  # type: ignore[assignment]
    assert allowed == [[p <= q and q - p < span for p in held] for q in queries]
