"""A batch in plain Python: each row a list of tags; what the tests of batch caches compare with.

A token's key is its tag in every element, its value the tag's negative; so the order in which a cache holds positions can be
read off, and a mask's meaning can be checked without knowing where anything lies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from engine.cache.protocol import KVCache
from engine.errors import RequestError

WIDTH = 3
JUNK = -7.0  # what is fed as padding


happenings = st.lists(  # the numbers choose rows and lengths, whatever there is at that time
    st.one_of(
        st.tuples(st.just("step"), st.one_of(st.just(1), st.integers(1, 9))),
        st.tuples(st.just("uneven"), st.integers(0, 10_000)),
        st.tuples(st.just("filter"), st.integers(0, 10_000)),
        st.tuples(st.just("extend"), st.integers(0, 10_000)),
        st.tuples(st.just("trim"), st.integers(0, 5)),
        st.tuples(st.just("regroup"), st.just(0)),
    ),
    min_size=1,
    max_size=14,
)


def heads(rows: Sequence[Sequence[float]]) -> tuple[mx.array, mx.array]:
    """Keys and values [B, 2, L, WIDTH] of rows of tags of one length."""
    tags = mx.array(np.array(rows, dtype=np.float32))
    keys = mx.broadcast_to(tags[:, None, :, None], (*tags.shape[:1], 2, tags.shape[1], WIDTH))
    return keys, -keys


def seen(
    cache: KVCache, new: Sequence[Sequence[float]], *, window: int | None = None
) -> tuple[KVCache, list[list[list[float]]]]:
    """Append a column or more a row; the cache, and for each row and new query the tags that the mask shows it, sorted."""
    L = len(new[0])
    mask = cache.mask(L, window=window)
    longer, keys, values = cache.append(*heads(new))
    assert isinstance(mask, mx.array)
    assert isinstance(keys, mx.array)
    assert isinstance(values, mx.array)
    shown, held = np.array(mask), np.array(keys)
    assert (held == -np.array(values)).all()
    assert (held == held[:, :1, :, :1]).all()
    assert shown.shape == (len(new), 1, L, held.shape[2])
    return longer, [
        [sorted(held[row, 0, shown[row, 0, query], 0].tolist()) for query in range(L)] for row in range(len(new))
    ]


def tags(keys: mx.array | None) -> list[float]:
    """The tags of one row's keys [1, 2, T, WIDTH], in order."""
    return [] if keys is None else np.array(keys)[0, 0, :, 0].tolist()


class History:
    """Rows of tags, and the batch cache that is to hold them.

    Args:
        lengths: Tokens of each row.
        merged: Single caches to a batch.
        single: Tags to the cache of a sequence that has seen them.
        window: Tokens that a query sees, itself included; None for all.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        merged: Callable[[Sequence[Any]], Any],
        single: Callable[[Sequence[float]], Any],
        window: int | None = None,
    ) -> None:
        self._merged, self._single, self._window = merged, single, window
        self._next = 1.0
        self.rows = [self._new(length) for length in lengths]
        self.cache = merged([single(row) for row in self.rows])

    def happen(self, what: str, number: int) -> None:
        """Let it happen to both, then compare what each row's own cache would see next."""
        getattr(self, f"_{what}")(number)
        assert self.cache.rows == len(self.rows)
        assert self.cache.row_offsets == tuple(map(len, self.rows))
        for row, own in enumerate(self.rows):
            alone = self.cache.extract(row)
            assert alone.offset == len(own)
            assert sorted(tags(alone.append(*heads([[0.0]]))[1])) == sorted(self._last([*own, 0.0]))

    def _new(self, count: int) -> list[float]:
        first, self._next = self._next, self._next + count
        return [first + i for i in range(count)]

    def _last(self, row: Sequence[float]) -> list[float]:
        return list(row) if self._window is None else list(row[-self._window :])

    def _fed(self, block: Sequence[Sequence[float]], lengths: Sequence[int]) -> None:
        self.cache, shown = seen(self.cache, block)
        for row, (new, length) in enumerate(zip(block, lengths, strict=True)):
            whole = [*self.rows[row], *new[:length]]
            before = len(self.rows[row]) + 1
            assert shown[row][:length] == [self._last(whole[: before + query]) for query in range(length)]
            self.rows[row] = whole

    def _step(self, length: int) -> None:
        self._fed([self._new(length) for _ in self.rows], [length] * len(self.rows))

    def _uneven(self, number: int) -> None:
        lengths = [1 + (number >> 2 * row) % 5 for row in range(len(self.rows))]
        new = [self._new(length) for length in lengths]
        self.cache = self.cache.prepare(lengths)
        self._fed([row + [JUNK] * (max(lengths) - len(row)) for row in new], lengths)
        self.cache = self.cache.finalize()

    def _filter(self, number: int) -> None:
        keep = [row for row in range(len(self.rows)) if number >> row & 1] or [number % len(self.rows)]
        keep.reverse()
        self.cache, self.rows = self.cache.filter(keep), [self.rows[row] for row in keep]

    def _extend(self, number: int) -> None:
        if len(self.rows) > 5:
            return
        joining = [self._new(number % 7), self._new(number % 11)]
        other = self._merged([self._single(row) for row in joining])
        self.cache, self.rows = self.cache.extend(other), self.rows + joining

    def _trim(self, n: int) -> None:
        n = min(n, *map(len, self.rows))
        if n and not self.cache.trimmable:
            with pytest.raises(RequestError, match="cannot forget its last tokens"):
                self.cache.trim(n)
            return
        self.cache, self.rows = self.cache.trim(n), [row[: len(row) - n] for row in self.rows]

    def _regroup(self, _: int) -> None:
        self.cache = self._merged([self.cache.extract(row) for row in range(len(self.rows))])
