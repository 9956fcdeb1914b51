"""The recurrent cache as a batch: masks and ends of padded columns, and rows that come, go and stay themselves."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.recurrent import RecurrentCache, without_padding
from engine.errors import RequestError

Check = Callable[..., None]
Normal = Callable[..., mx.array]


def state(normal: Normal, seed: int, rows: int = 1) -> RecurrentCache:
    cache = RecurrentCache.padded(2, [0] * rows)
    return cache.advanced(normal(seed, (rows, 3, 4)), normal(seed + 1, (rows, 2, 2, 2)), by=5)


def shown(cache: RecurrentCache, L: int) -> list[list[bool]] | None:
    mask = cache.mask(L)
    return None if mask is None else np.array(mask).tolist()


def test_left_padding_is_hidden_and_runs_out_with_the_columns() -> None:
    cache = RecurrentCache.padded(1, [0, 3, 1])
    assert shown(cache, 2) == [[True, True], [False, False], [False, True]]
    assert cache.ends(2) is None
    cache = cache.advanced(None, by=2)
    assert shown(cache, 2) == [[True, True], [False, True], [True, True]]
    cache = cache.advanced(None, by=2)
    assert (cache.mask(2), cache.rows, cache.offset) == (None, 3, 4)


def test_right_padding_begins_where_a_row_ends() -> None:
    cache = RecurrentCache.padded(1, [0, 0]).prepare([5, 2])
    assert shown(cache, 5) == [[True] * 5, [True, True, False, False, False]]
    assert cache.ends(5) == (5, 2)
    later = cache.advanced(None, by=3)
    assert (later.ends(2), shown(later, 2)) == ((2, 0), [[True, True], [False, False]])
    assert cache.finalize().mask(3) is None
    with pytest.raises(ValueError, match="lengths"):
        cache.prepare([1])


def test_a_sequence_alone_has_no_mask() -> None:
    cache = RecurrentCache.empty(1)
    assert (cache.mask(4), cache.ends(4), cache.rows) == (None, None, 1)
    x = mx.ones((1, 2, 3))
    assert without_padding(x, None) is x


def test_padding_is_zeroed_before_it_enters_a_state(normal: Normal, same_bits: Check) -> None:
    x = normal(0, (2, 2, 3))
    masked = without_padding(x, RecurrentCache.padded(1, [0, 1]).mask(2))
    same_bits(x[0], masked[0])
    same_bits(x[1, 1], masked[1, 1])
    assert masked[1, 0].tolist() == [0.0, 0.0, 0.0]


def test_rows_merge_filter_extend_and_come_out_as_they_were(normal: Normal, same_bits: Check) -> None:
    rows = [state(normal, seed) for seed in (0, 10, 20)]
    batch = RecurrentCache.merged(rows[:2]).extend(RecurrentCache.merged(rows[2:])).filter([2, 0])
    assert batch.rows == 2
    for row, own in enumerate((rows[2], rows[0])):
        for expected, actual in zip(own.arrays, batch.extract(row).arrays, strict=True):
            same_bits(expected, actual)


def test_a_row_that_has_seen_nothing_is_zeros_beside_others(normal: Normal) -> None:
    batch = RecurrentCache.merged([RecurrentCache.empty(2), state(normal, 0)])
    assert all(not np.array(array[0]).any() and np.array(array[1]).any() for array in batch.arrays)
    joined = RecurrentCache.merged([RecurrentCache.empty(2)]).extend(state(normal, 0))
    assert all(not np.array(array[0]).any() and np.array(array[1]).any() for array in joined.arrays)
    assert RecurrentCache.merged([RecurrentCache.empty(2)] * 3).state == (None, None)


def test_a_batch_in_the_middle_of_padded_columns_takes_no_one_in(normal: Normal) -> None:
    for cache in (RecurrentCache.padded(2, [0, 1]), RecurrentCache.padded(2, [0, 0]).prepare([2, 1])):
        with pytest.raises(ValueError, match="padded columns"):
            cache.extend(state(normal, 0))


def test_other_kinds_and_rows_that_are_not_there_are_refused(normal: Normal) -> None:
    with pytest.raises(RequestError, match="caches of different kinds"):
        RecurrentCache.merged([RecurrentCache.empty(1), RecurrentCache.empty(2)])
    with pytest.raises(RequestError, match="caches of different kinds"):
        state(normal, 0).extend(RecurrentCache.empty(1))
    with pytest.raises(RequestError, match="no such rows"):
        state(normal, 0).filter([1])
