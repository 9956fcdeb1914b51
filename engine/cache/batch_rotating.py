"""The batch of rotating caches: one ring of columns for all rows, each with padding and positions of its own.

A row's padding is counted in columns from the ring's oldest one; below 0 it has already rotated out. Of a row that came round
before it joined, what it still saw is held. First positions that never leave (`keep`) do not exist here.

Source: spec/kv.md section 10 (semantics), section 2 (the ring).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.batch_columns import (
    check_alike,
    check_lengths,
    check_rows,
    pad_left,
    right_padding,
    rolled,
    side_by_side,
)
from engine.cache.protocol import SLAB, check_trim
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError
from engine.mask import Mask, causal_matrix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRotatingCache:
    """A ring of keys and values of several sequences.

    Attributes:
        max_size: Columns kept.
        padding: Of each row, columns from the oldest that hold nothing; below 0 where none does.
        row_offsets: Position of each row's next token.
        offset: Columns ever appended since the batch was put together.
        index: Where the next single column is written.
        rotated: Whether the ring has come round, so that `index` is not its end.
        keys: Buffer [B, K, capacity, E], or None while empty.
        values: Buffer [B, K, capacity, E], or None while empty.
        right: Columns at the right of each row that hold nothing, until they are rolled to the left.
    """

    max_size: int
    padding: tuple[int, ...]
    row_offsets: tuple[int, ...]
    offset: int = 0
    index: int = 0
    rotated: bool = False
    keys: mx.array | None = None
    values: mx.array | None = None
    right: tuple[int, ...] | None = None

    @classmethod
    def empty(cls, max_size: int, padding: Sequence[int]) -> "BatchRotatingCache":
        """A row for each number, which is that row's left padding in the columns to come."""
        return cls(max_size=max_size, padding=tuple(padding), row_offsets=tuple(-pad for pad in padding))

    @classmethod
    def merged(cls, rows: Sequence[RotatingCache]) -> "BatchRotatingCache":
        """Single sequences side by side, each with what it still sees; any may be empty.

        Raises:
            RequestError: Their windows differ, or one keeps first positions for ever.
        """
        if len({row.max_size for row in rows}) > 1 or any(row.keep for row in rows):
            raise RequestError(
                "rotating caches cannot share a batch",
                kinds=", ".join(sorted({row.kind for row in rows})),
                next_step="batch sequences of one window, with no first positions kept",
            )
        max_size = rows[0].max_size
        held = [min(row.offset, max_size) for row in rows]
        used = max(held)
        straight = [row.straight() for row in rows]
        keys = [None if pair is None else pair[0][:, :, -size:] for pair, size in zip(straight, held, strict=True)]
        values = [None if pair is None else pair[1][:, :, -size:] for pair, size in zip(straight, held, strict=True)]
        return cls(
            max_size=max_size,
            padding=tuple(used - size for size in held),
            row_offsets=tuple(row.offset for row in rows),
            offset=used,
            index=used,
            keys=side_by_side(keys, columns=used),
            values=side_by_side(values, columns=used),
        )

    @property
    def rows(self) -> int:
        """B."""
        return len(self.padding)

    @property
    def kind(self) -> str:
        """Such as `batch-rotating-w512`."""
        return f"batch-rotating-w{self.max_size}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The two buffers, or nothing while empty."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["BatchRotatingCache", mx.array, mx.array]:
        """Add L columns; returns the new cache and the keys and values that it holds, in the ring's order.

        Numerics: none; bits are stored as they come.
        """
        L = keys_BKLE.shape[2]
        if self.right is not None and any(pad >= L for pad in self.right):
            raise ValueError(f"{L} columns with right padding {self.right}: one append, then finalize")
        new, keys, values = (self._written if L == 1 else self._joined)(keys_BKLE, values_BKLE)
        new = replace(
            new,
            keys=keys,
            values=values,
            offset=self.offset + L,
            row_offsets=tuple(offset + L for offset in self.row_offsets),
        )
        if new.offset < keys.shape[2]:
            return new, keys[:, :, : new.offset], values[:, :, : new.offset]
        return new, keys, values

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new columns over what `append` will return, [B, 1, L, T]; always an array.

        Where several columns follow a ring that has come round, the oracle hides a token more of rows that are padded; its own
        loop never feeds several there.
        """
        del as_array
        before = min(self.max_size - 1, self.offset)
        straightens = L > 1 and self.rotated
        end = self.max_size if straightens else self.index
        gone = max(end - self.max_size + (L > 1), 0)
        rolls = L == 1 and (self.rotated or self.index >= self.max_size)
        padding = mx.array([pad - gone - rolls for pad in self.padding])[:, None, None, None]
        allowed = causal_matrix(L, before=before, window=window or self.max_size) & (mx.arange(before + L) >= padding)
        if not rolls:
            return allowed
        at = 0 if self.index >= self.max_size else self.index
        return mx.roll(allowed, at + 1, -1)

    @property
    def trimmable(self) -> bool:
        """While it has not come round: a column that is overwritten is lost."""
        return self.offset < self.max_size and all(offset < self.max_size for offset in self.row_offsets)

    def trim(self, n: int) -> "BatchRotatingCache":
        """The cache without each row's last `n` tokens.

        Raises:
            RequestError: It has come round, or a row holds fewer.
        """
        check_trim(self, n, held=max(min(self.row_offsets), 0))
        return replace(
            self,
            offset=self.offset - n,
            index=self.index - n,
            row_offsets=tuple(offset - n for offset in self.row_offsets),
        )

    def prepare(self, lengths: Sequence[int]) -> "BatchRotatingCache":
        """Announce right padding: of the next append, row b's first `lengths[b]` columns alone are tokens."""
        check_lengths(lengths, rows=self.rows)
        return replace(self, right=right_padding(lengths))

    def finalize(self) -> "BatchRotatingCache":
        """Roll the right padding of the last append to the left, over what the window no longer needs."""
        if self.right is None or self.keys is None or self.values is None:
            return replace(self, right=None)
        keys, values = (rolled(array[:, :, : self.index], self.right) for array in (self.keys, self.values))
        return replace(
            self,
            keys=keys,
            values=values,
            padding=tuple(map(sum, zip(self.padding, self.right, strict=True))),
            row_offsets=tuple(offset - pad for offset, pad in zip(self.row_offsets, self.right, strict=True)),
            right=None,
        )

    def filter(self, keep: Sequence[int]) -> "BatchRotatingCache":
        """The chosen rows.

        Raises:
            RequestError: There is no such row.
        """
        check_rows(keep, rows=self.rows)
        chosen = mx.array(tuple(keep))
        return replace(
            self,
            keys=None if self.keys is None else self.keys[chosen],
            values=None if self.values is None else self.values[chosen],
            padding=tuple(self.padding[row] for row in keep),
            row_offsets=tuple(self.row_offsets[row] for row in keep),
        )

    def extend(self, other: "BatchRotatingCache") -> "BatchRotatingCache":
        """The rows of both, this one's first; rings that are not at the same place are straightened.

        Raises:
            RequestError: `other` is of another kind.
            ValueError: Right padding of one is not rolled to the left yet.
        """
        check_alike(self, other)
        if self.right or other.right:
            raise ValueError("a batch with right padding: finalize it before others join")
        one, two = self, other
        if (one.rotated, one.index) != (two.rotated, two.index):
            one, two = one.straight(), two.straight()
        index = max(one.index, two.index)
        return replace(
            one,
            keys=_stacked((one.keys, one), (two.keys, two), index=index),
            values=_stacked((one.values, one), (two.values, two), index=index),
            padding=tuple(pad + index - cache.index for cache in (one, two) for pad in cache.padding),
            row_offsets=one.row_offsets + two.row_offsets,
            offset=max(one.offset, two.offset),
            index=index,
        )

    def extract(self, row: int) -> RotatingCache:
        """One row as a cache of its own, in memory of its own.

        Raises:
            RequestError: There is no such row.
        """
        check_rows([row], rows=self.rows)
        whole = self.straight()
        if whole.keys is None or whole.values is None:
            return RotatingCache(max_size=self.max_size)
        at = slice(max(whole.padding[row], 0), whole.index)
        keys, values = (mx.contiguous(array[row : row + 1, :, at]) for array in (whole.keys, whole.values))
        return RotatingCache(
            max_size=self.max_size, keys=keys, values=values, offset=self.row_offsets[row], index=keys.shape[2]
        )

    def straight(self) -> "BatchRotatingCache":
        """The ring with its oldest column first."""
        if not self.rotated or self.keys is None or self.values is None:
            return self
        keys, values = (mx.roll(array, -self.index, 2) for array in (self.keys, self.values))
        return replace(self, keys=keys, values=values, index=keys.shape[2], rotated=False)

    def _joined(self, *new: mx.array) -> tuple["BatchRotatingCache", mx.array, mx.array]:
        """The ring straightened, cut so that the oldest new query still sees its window, then the new columns."""
        if self.keys is None or self.values is None:
            keys, values = new
            return replace(self, index=keys.shape[2]), keys, values
        whole = self.straight()
        drop = max(whole.index - self.max_size + 1, 0)
        keys, values = (
            mx.concatenate([old[:, :, drop : whole.index], one], axis=2)
            for old, one in zip(whole.arrays, new, strict=True)
        )
        padding = tuple(pad - drop for pad in whole.padding)
        return replace(whole, padding=padding, index=keys.shape[2]), keys, values

    def _written(self, *new: mx.array) -> tuple["BatchRotatingCache", mx.array, mx.array]:
        """Buffers with one column written."""
        index, rotated, gone = self.index, self.rotated, 0
        capacity = 0 if self.keys is None else self.keys.shape[2]
        grows = self.offset >= capacity and capacity < self.max_size
        if grows:
            index = self.offset
        elif capacity > self.max_size:
            gone = capacity - self.max_size
            index = self.max_size
        if index == self.max_size:
            index, rotated = 0, True
        buffers = []
        for old, one in zip((self.keys, self.values), new, strict=True):
            B, K, _, E = one.shape
            buffer = mx.zeros((B, K, 0, E), dtype=one.dtype) if old is None else old[:, :, gone:]
            if grows:
                slab = mx.zeros((B, K, min(SLAB, self.max_size - self.offset), E), dtype=one.dtype)
                buffer = mx.concatenate([buffer, slab], axis=2)
            buffers.append(mx.slice_update(buffer, one, mx.array([index]), axes=(2,)))
        padding = tuple(pad - gone - rotated for pad in self.padding)
        return replace(self, padding=padding, index=index + 1, rotated=rotated), buffers[0], buffers[1]


def _stacked(*batches: tuple[mx.array | None, BatchRotatingCache], index: int) -> mx.array | None:
    """Straight buffers, right-justified at `index`, row after row; rings at the same place as they are."""
    some = next((array for array, _ in batches if array is not None), None)
    if some is None:
        return None
    _, K, _, N = some.shape
    empty = [mx.zeros((cache.rows, K, 0, N), dtype=some.dtype) for _, cache in batches]
    filled = [
        none if array is None else array if cache.rotated else array[:, :, : cache.index]
        for none, (array, cache) in zip(empty, batches, strict=True)
    ]
    return mx.concatenate(
        [
            array if cache.rotated else pad_left(array, index - array.shape[2])
            for array, (_, cache) in zip(filled, batches, strict=True)
        ],
        axis=0,
    )
