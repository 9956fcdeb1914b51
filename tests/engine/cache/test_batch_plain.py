"""The batch of plain caches: whatever happens to it, each row sees what is its own, and all of it."""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.batch_plain import BatchPlainCache
from engine.cache.plain import PlainCache
from engine.errors import RequestError
from tests.engine.cache.tagged_rows import JUNK, History, happenings, heads, seen, tags


def single(row: Sequence[float]) -> PlainCache:
    return PlainCache().append(*heads([row]))[0] if row else PlainCache()


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), happenings=happenings)
@settings(max_examples=40, deadline=None)
def test_for_any_history_each_row_sees_its_own_tokens_and_all_of_them(
    lengths: list[int], happenings: list[tuple[str, int]]
) -> None:
    history = History(lengths, merged=BatchPlainCache.merged, single=single)
    for what, number in happenings:
        history.happen(what, number)
        if what == "filter" and any(history.rows):
            assert min(history.cache.columns.padding) == 0, "padding that all rows share is dropped"


def test_left_padding_of_an_empty_batch_is_hidden_and_counts_as_no_position() -> None:
    cache = BatchPlainCache.empty([0, 2])
    assert cache.row_offsets == (0, -2)
    longer, shown = seen(cache, [[1.0, 2.0, 3.0, 4.0], [JUNK, JUNK, 5.0, 6.0]])
    assert shown == [[[1.0], [1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]], [[], [], [5.0], [5.0, 6.0]]]
    assert isinstance(longer, BatchPlainCache)
    assert (longer.row_offsets, longer.offset) == ((4, 2), 4)
    assert tags(longer.extract(1).keys) == [5.0, 6.0]


def test_a_window_is_counted_in_positions_of_a_row() -> None:
    cache = BatchPlainCache.merged([single([1.0, 2.0, 3.0]), single([4.0])])
    _, shown = seen(cache, [[5.0], [6.0]], window=2)
    assert shown == [[[3.0, 5.0]], [[4.0, 6.0]]]


@pytest.mark.parametrize("lengths", [[1, 255, 1], [6, 251]])
def test_it_grows_by_slabs_as_a_plain_cache_does(lengths: list[int]) -> None:
    plain, batch = PlainCache(), BatchPlainCache.empty([0, 0])
    for length in lengths:
        new = heads([[1.0] * length])
        plain, batch = plain.append(*new)[0], batch.append(*heads([[1.0] * length] * 2))[0]
        assert [a.shape[2] for a in plain.arrays] == [a.shape[2] for a in batch.arrays]


def test_it_is_a_value() -> None:
    start = BatchPlainCache.merged([single([1.0, 2.0]), single([3.0])])
    one, two = start.append(*heads([[8.0], [8.0]]))[0], start.append(*heads([[9.0], [9.0]]))[0]
    assert [tags(cache.extract(1).keys) for cache in (start, one, two)] == [[3.0], [3.0, 8.0], [3.0, 9.0]]
    for change in (start.filter([1]), start.trim(1), start.extend(one)):
        assert change is not start
    assert [tags(start.extract(row).keys) for row in range(2)] == [[1.0, 2.0], [3.0]]


def test_rows_that_are_not_there_are_refused() -> None:
    cache = BatchPlainCache.empty([0, 0])
    for choose in (lambda: cache.filter([0, 2]), lambda: cache.filter([]), lambda: cache.extract(-1)):
        with pytest.raises(RequestError, match="no such rows in the batch"):
            choose()
    with pytest.raises(RequestError) as caught:
        cache.filter([0, 2])
    assert str(caught.value) == (
        "no such rows in the batch\n  asked for  0, 2\n  rows       2\n  next       name at least one of 0 to 1"
    )


def test_a_trim_beyond_the_shortest_row_is_refused() -> None:
    cache = BatchPlainCache.merged([single([1.0, 2.0, 3.0]), single([4.0])])
    with pytest.raises(RequestError) as caught:
        cache.trim(2)
    assert str(caught.value) == (
        "the cache does not hold as many tokens as it is to forget\n"
        "  kind    batch-plain\n"
        "  holds   1\n"
        "  tokens  2\n"
        "  next    forget 0 to 1"
    )


def test_right_padding_is_announced_for_one_append() -> None:
    cache = BatchPlainCache.empty([0, 0]).prepare([3, 1])
    with pytest.raises(ValueError, match="one append, then finalize"):
        cache.append(*heads([[1.0, 2.0], [3.0, JUNK]]))
    with pytest.raises(ValueError, match="finalize"):
        cache.extend(cache)
    with pytest.raises(ValueError, match="lengths"):
        cache.prepare([3])


def test_a_planted_mask_without_padding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpadded(self: BatchPlainCache, L: int, **_: object) -> mx.array:
        keys = mx.arange(self.offset + L)
        return mx.broadcast_to(mx.arange(self.offset, self.offset + L)[:, None] >= keys, (self.rows, 1, L, keys.size))

    monkeypatch.setattr(BatchPlainCache, "mask", unpadded)
    with pytest.raises(AssertionError):
        History([3, 1], merged=BatchPlainCache.merged, single=single).happen("step", 1)
