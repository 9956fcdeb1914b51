"""The batch of quantised caches: keys and values packed as they are appended, rows padded at their left.

Words, scales and biases move together by position, so everything that a batch does is done to each of the three. It begins with
no positions (a batch of `EmptyQuantizedCache`s), or with what single quantised caches hold.

Source: spec/kv.md sections 3 and 10.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.batch_columns import Columns, check_alike, check_rows, rolled, side_by_side
from engine.cache.batch_plain import joined_rows
from engine.cache.protocol import PackedHeads, Tiling, check_trim, grown
from engine.cache.quantized import EmptyQuantizedCache, QuantizedCache, pack
from engine.mask import Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchQuantizedCache:
    """Packed keys and values of several sequences.

    Attributes:
        columns: Which columns hold what.
        bits: Width of a stored element.
        group_size: Elements of a head that share a scale and a bias.
        tiling: Tiles of attention, or None.
        keys: Buffers of one capacity, or None while empty.
        values: Likewise.
    """

    columns: Columns
    bits: int
    group_size: int
    tiling: Tiling | None = None
    keys: PackedHeads | None = None
    values: PackedHeads | None = None

    @classmethod
    def empty(cls, padding: Sequence[int], like: EmptyQuantizedCache) -> "BatchQuantizedCache":
        """A row for each number, which is that row's left padding in the columns to come."""
        columns = Columns(padding=tuple(padding))
        return cls(columns=columns, bits=like.bits, group_size=like.group_size, tiling=like.tiling)

    @classmethod
    def merged(cls, rows: Sequence[QuantizedCache | EmptyQuantizedCache]) -> "BatchQuantizedCache":
        """Single sequences side by side; any may be empty.

        Raises:
            RequestError: Their widths differ.
        """
        for row in rows[1:]:
            check_alike(rows[0], row)
        used = max(row.offset for row in rows)
        like = rows[0].keys if isinstance(rows[0], QuantizedCache) else rows[0]
        return cls(
            columns=Columns(padding=tuple(used - row.offset for row in rows), used=used),
            bits=like.bits,
            group_size=like.group_size,
            tiling=like.tiling,
            keys=_beside([(row.keys, row.offset) if isinstance(row, QuantizedCache) else None for row in rows], used),
            values=_beside(
                [(row.values, row.offset) if isinstance(row, QuantizedCache) else None for row in rows], used
            ),
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
        """Such as `batch-quantized-b8-g64`."""
        return f"batch-quantized-b{self.bits}-g{self.group_size}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Words, scales and biases of keys, then of values; nothing while empty."""
        held = (heads for heads in (self.keys, self.values) if heads is not None)
        return tuple(array for heads in held for array in _parts(heads))

    def append(
        self, keys_BKLE: mx.array, values_BKLE: mx.array
    ) -> tuple["BatchQuantizedCache", PackedHeads, PackedHeads]:
        """Pack L columns and add them; returns the new cache and views of all T columns so far.

        Numerics: scales and biases are rounded to the dtype of what is packed.
        """
        columns = self.columns.longer(keys_BKLE.shape[2])
        keys, values = self._longer(self.keys, keys_BKLE), self._longer(self.values, values_BKLE)
        new = replace(self, columns=columns, keys=keys, values=values)
        return new, _each(keys, lambda a: a[:, :, : columns.used]), _each(values, lambda a: a[:, :, : columns.used])

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new columns over all so far, [B, 1, L, T]; always an array."""
        del as_array
        return self.columns.mask(L, window=window)

    @property
    def trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> "BatchQuantizedCache":
        """The cache without each row's last `n` tokens.

        Raises:
            RequestError: A row holds fewer.
        """
        check_trim(self, n, held=max(min(self.row_offsets), 0))
        return replace(self, columns=replace(self.columns, used=self.columns.used - n))

    def prepare(self, lengths: Sequence[int]) -> "BatchQuantizedCache":
        """Announce right padding: of the next append, row b's first `lengths[b]` columns alone are tokens."""
        return replace(self, columns=self.columns.prepared(lengths))

    def finalize(self) -> "BatchQuantizedCache":
        """Roll the right padding of the last append to the left."""
        right, used = self.columns.right, self.columns.used
        if right is None:
            return self
        return self._changed(self.columns.finalized(), lambda array: rolled(array[:, :, :used], right))

    def filter(self, keep: Sequence[int]) -> "BatchQuantizedCache":
        """The chosen rows, less the padding that they have in common.

        Raises:
            RequestError: There is no such row.
        """
        check_rows(keep, rows=self.rows)
        columns, drop = self.columns.filtered(keep)
        chosen = mx.array(tuple(keep))
        return self._changed(columns, lambda array: array[chosen][:, :, drop:])

    def extend(self, other: "BatchQuantizedCache") -> "BatchQuantizedCache":
        """The rows of both, this one's first.

        Raises:
            RequestError: `other` is of another kind.
        """
        check_alike(self, other)
        columns = self.columns.extended(other.columns)
        pairs = ((self.keys, other.keys), (self.values, other.values))
        keys, values = (_joined(one, self.columns, two, other.columns, columns.used) for one, two in pairs)
        return replace(self, columns=columns, keys=keys, values=values)

    def extract(self, row: int) -> QuantizedCache | EmptyQuantizedCache:
        """One row as a cache of its own, in memory of its own.

        Raises:
            RequestError: There is no such row.
        """
        check_rows([row], rows=self.rows)
        if self.keys is None or self.values is None:
            return EmptyQuantizedCache(bits=self.bits, group_size=self.group_size, tiling=self.tiling)
        start, end = self.columns.padding[row], self.columns.used
        keys, values = (
            _each(heads, lambda array: mx.contiguous(array[row : row + 1, :, start:end]))
            for heads in (self.keys, self.values)
        )
        return QuantizedCache(keys=keys, values=values, offset=end - start)

    def _longer(self, heads: PackedHeads | None, new_BKLE: mx.array) -> PackedHeads:
        new = pack(new_BKLE, bits=self.bits, group_size=self.group_size, tiling=self.tiling)
        olds = (None, None, None) if heads is None else _parts(heads)
        parts = (grown(old, self.columns.used, part) for old, part in zip(olds, _parts(new), strict=True))
        return _packed(new, *parts)

    def _changed(self, columns: Columns, change: Callable[[mx.array], mx.array]) -> "BatchQuantizedCache":
        keys, values = (None if heads is None else _each(heads, change) for heads in (self.keys, self.values))
        return replace(self, columns=columns, keys=keys, values=values)


def _parts(heads: PackedHeads) -> tuple[mx.array, mx.array, mx.array]:
    return heads.weight, heads.scales, heads.biases


def _packed(like: PackedHeads, *parts: mx.array) -> PackedHeads:
    weight, scales, biases = parts
    return replace(like, weight=weight, scales=scales, biases=biases)


def _each(heads: PackedHeads, change: Callable[[mx.array], mx.array]) -> PackedHeads:
    return _packed(heads, *map(change, _parts(heads)))


def _beside(rows: Sequence[tuple[PackedHeads, int] | None], used: int) -> PackedHeads | None:
    some = next((row[0] for row in rows if row is not None), None)
    if some is None:
        return None
    cut = [None if row is None else tuple(array[:, :, : row[1]] for array in _parts(row[0])) for row in rows]
    parts = (side_by_side([None if row is None else row[i] for row in cut], columns=used) for i in range(3))
    return _packed(some, *(part for part in parts if part is not None))


def _joined(
    one: PackedHeads | None, columns: Columns, two: PackedHeads | None, others: Columns, used: int
) -> PackedHeads | None:
    some = one or two
    if some is None:
        return None
    ones, twos = ((None, None, None) if heads is None else _parts(heads) for heads in (one, two))
    parts = (joined_rows((a, columns), (b, others), used=used) for a, b in zip(ones, twos, strict=True))
    return _packed(some, *(part for part in parts if part is not None))
