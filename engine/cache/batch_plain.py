"""The batch of plain caches: keys and values as computed, rows padded at their left, columns that grow by slabs of 256.

Source: spec/kv.md section 10.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.batch_columns import Columns, check_alike, check_rows, pad_left, rolled, side_by_side
from engine.cache.plain import PlainCache
from engine.cache.protocol import check_trim, grown
from engine.mask import Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlainCache:
    """Keys and values of several sequences.

    Attributes:
        columns: Which columns hold what.
        keys: Buffer [B, K, capacity, E], or None while empty.
        values: Buffer [B, K, capacity, E], or None while empty.
    """

    columns: Columns
    keys: mx.array | None = None
    values: mx.array | None = None

    @classmethod
    def empty(cls, padding: Sequence[int]) -> "BatchPlainCache":
        """A row for each number, which is that row's left padding in the columns to come."""
        return cls(columns=Columns(padding=tuple(padding)))

    @classmethod
    def merged(cls, rows: Sequence[PlainCache]) -> "BatchPlainCache":
        """Single sequences side by side; any may be empty."""
        used = max(row.offset for row in rows)
        keys = [None if row.keys is None else row.keys[:, :, : row.offset] for row in rows]
        values = [None if row.values is None else row.values[:, :, : row.offset] for row in rows]
        return cls(
            columns=Columns(padding=tuple(used - row.offset for row in rows), used=used),
            keys=side_by_side(keys, columns=used),
            values=side_by_side(values, columns=used),
        )

    @property
    def rows(self) -> int:
        """B."""
        return self.columns.rows

    @property
    def offset(self) -> int:
        """Columns in use, padding included."""
        return self.columns.used

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """Position of each row's next token."""
        return self.columns.row_offsets

    @property
    def kind(self) -> str:
        """`batch-plain`."""
        return "batch-plain"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The two buffers, or nothing while empty."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["BatchPlainCache", mx.array, mx.array]:
        """Add L columns; returns the new cache and views [B, K, T, E] of all T columns so far.

        Numerics: none; bits are stored as they come.
        """
        keys = grown(self.keys, self.columns.used, keys_BKLE)
        values = grown(self.values, self.columns.used, values_BKLE)
        columns = self.columns.longer(keys_BKLE.shape[2])
        new = replace(self, columns=columns, keys=keys, values=values)
        return new, keys[:, :, : columns.used], values[:, :, : columns.used]

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new columns over all so far, [B, 1, L, T]; always an array."""
        del as_array
        return self.columns.mask(L, window=window)

    @property
    def trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> "BatchPlainCache":
        """The cache without each row's last `n` tokens.

        Raises:
            RequestError: A row holds fewer.
        """
        check_trim(self, n, held=max(min(self.row_offsets), 0))
        return replace(self, columns=replace(self.columns, used=self.columns.used - n))

    def prepare(self, lengths: Sequence[int]) -> "BatchPlainCache":
        """Announce right padding: of the next append, row b's first `lengths[b]` columns alone are tokens."""
        return replace(self, columns=self.columns.prepared(lengths))

    def finalize(self) -> "BatchPlainCache":
        """Roll the right padding of the last append to the left."""
        right = self.columns.right
        if right is None or self.keys is None or self.values is None:
            return replace(self, columns=self.columns.finalized())
        keys, values = (rolled(array[:, :, : self.columns.used], right) for array in (self.keys, self.values))
        return replace(self, columns=self.columns.finalized(), keys=keys, values=values)

    def filter(self, keep: Sequence[int]) -> "BatchPlainCache":
        """The chosen rows, less the padding that they have in common.

        Raises:
            RequestError: There is no such row.
        """
        check_rows(keep, rows=self.rows)
        columns, drop = self.columns.filtered(keep)
        if self.keys is None or self.values is None:
            return replace(self, columns=columns)
        chosen = mx.array(tuple(keep))
        keys, values = (array[chosen][:, :, drop:] for array in (self.keys, self.values))
        return replace(self, columns=columns, keys=keys, values=values)

    def extend(self, other: "BatchPlainCache") -> "BatchPlainCache":
        """The rows of both, this one's first.

        Raises:
            RequestError: `other` is of another kind.
        """
        check_alike(self, other)
        columns = self.columns.extended(other.columns)
        return BatchPlainCache(
            columns=columns,
            keys=joined_rows((self.keys, self.columns), (other.keys, other.columns), used=columns.used),
            values=joined_rows((self.values, self.columns), (other.values, other.columns), used=columns.used),
        )

    def extract(self, row: int) -> PlainCache:
        """One row as a cache of its own, in memory of its own.

        Raises:
            RequestError: There is no such row.
        """
        check_rows([row], rows=self.rows)
        if self.keys is None or self.values is None:
            return PlainCache()
        at = slice(self.columns.padding[row], self.columns.used)
        keys, values = (mx.contiguous(array[row : row + 1, :, at]) for array in (self.keys, self.values))
        return PlainCache(keys=keys, values=values, offset=keys.shape[2])


def joined_rows(*batches: tuple[mx.array | None, Columns], used: int) -> mx.array | None:
    """Buffers [B, K, capacity, N] of batches, cut to the columns in use and right-justified in `used` columns, row after row.

    A batch that holds nothing yet is zeros; None where none holds anything.
    """
    some = next((array for array, _ in batches if array is not None), None)
    if some is None:
        return None
    _, K, _, N = some.shape
    filled = (
        mx.zeros((columns.rows, K, 0, N), dtype=some.dtype) if array is None else array[:, :, : columns.used]
        for array, columns in batches
    )
    return mx.concatenate([pad_left(array, used - array.shape[2]) for array in filled], axis=0)
