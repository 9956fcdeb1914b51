"""The rotating cache: a ring of at most `max_size` positions, the first `keep` of which never leave.

One position at a time is written in place, so after a wrap the keys are not in temporal order; softmax does not mind, but
the order of its sum, and so its bits, do. Several positions at once first straighten the ring, then append to it, and may
leave it longer than `max_size` until the next single one. Source: spec/kv.md section 2 (semantics and traces).
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import SLAB, check_trim
from engine.mask import Mask, causal_matrix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RotatingCache:
    """A ring of keys and values.

    Attributes:
        max_size: Positions kept.
        keep: Of these, the first ones of the sequence that are never overwritten.
        keys: Buffer [B, K, capacity, E], or None while empty.
        values: Buffer [B, K, capacity, E], or None while empty.
        offset: Tokens ever appended.
        index: Where the next single position is written.
    """

    max_size: int
    keep: int = 0
    keys: mx.array | None = None
    values: mx.array | None = None
    offset: int = 0
    index: int = 0

    @property
    def kind(self) -> str:
        """Such as `rotating-w512-k0`."""
        return f"rotating-w{self.max_size}-k{self.keep}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The two buffers, or nothing while empty."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["RotatingCache", mx.array, mx.array]:
        """Add L positions; returns the new cache and the keys and values that it holds, in the ring's order.

        Numerics: none; bits are stored as they come.
        """
        L = keys_BKLE.shape[2]
        if L == 1:
            index, (keys, values) = self._written(keys_BKLE, values_BKLE)
        else:
            keys, values = (self._joined(old, new) for old, new in ((self.keys, keys_BKLE), (self.values, values_BKLE)))
            index = keys.shape[2]
        new = replace(self, keys=keys, values=values, offset=self.offset + L, index=index)
        if new.offset < keys.shape[2]:
            return new, keys[:, :, : new.offset], values[:, :, : new.offset]
        return new, keys, values

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over what `append` will return."""
        if L > 1:
            span = window or self.max_size
            before = min(self.max_size - 1, self.offset)
            if before + L > span or as_array:
                return causal_matrix(L, before=before, window=span)
            return "causal"
        if window is None or self.offset < window or self.max_size <= window:
            return None
        at = 0 if self.index >= self.max_size else self.index
        size = min(self.offset + 1, self.max_size)
        return mx.roll(mx.arange(size) >= size - window, at + 1)

    @property
    def trimmable(self) -> bool:
        """While it has not come round: a position that is overwritten is lost."""
        return self.offset < self.max_size

    def trim(self, n: int) -> "RotatingCache":
        """The cache without its last `n` tokens.

        Raises:
            RequestError: It has come round, or holds fewer.
        """
        check_trim(self, n)
        return replace(self, offset=self.offset - n, index=self.index - n)

    def straight(self) -> tuple[mx.array, mx.array] | None:
        """Keys and values that it holds, oldest first after the kept ones; None while empty."""
        if self.keys is None or self.values is None:
            return None
        return self._straightened(self.keys), self._straightened(self.values)

    def _written(self, *new: mx.array) -> tuple[int, tuple[mx.array, ...]]:
        """Buffers with one position written, and the index after it."""
        index = self.index
        buffers: list[mx.array] = []
        for old, one in zip((self.keys, self.values), new, strict=True):
            B, K, _, E = one.shape
            buffer, index = old, self.index  # keys and values rotate alike, each from the same place
            capacity = 0 if buffer is None else buffer.shape[2]
            if self.offset >= capacity and capacity < self.max_size:
                slab = mx.zeros((B, K, min(SLAB, self.max_size - self.offset), E), dtype=one.dtype)
                buffer = slab if buffer is None else mx.concatenate([buffer, slab], axis=2)
                index = self.offset
            elif buffer is not None and capacity > self.max_size:
                buffer = self._without(buffer, capacity - self.max_size)
                index = self.max_size
            if index == self.max_size:
                index = self.keep
            if buffer is None:
                raise AssertionError("a ring of no size")
            buffers.append(mx.slice_update(buffer, one, mx.array([index]), axes=(2,)))
        return index + 1, tuple(buffers)

    def _joined(self, old: mx.array | None, new: mx.array) -> mx.array:
        """The ring in temporal order, cut so that the oldest new query still sees its window, then the new positions."""
        if old is None:
            return new
        old = self._straightened(old)
        return mx.concatenate([self._without(old, old.shape[2] - self.max_size + 1), new], axis=2)

    def _straightened(self, old: mx.array) -> mx.array:
        if self.index == old.shape[2]:
            return old
        if self.index < self.offset:
            return mx.concatenate(
                [old[:, :, : self.keep], old[:, :, self.index :], old[:, :, self.keep : self.index]], axis=2
            )
        return old[:, :, : self.index]

    def _without(self, buffer: mx.array, count: int) -> mx.array:
        """`buffer` less its `count` oldest positions after the kept ones."""
        if count <= 0:
            return buffer
        if not self.keep:
            return buffer[:, :, count:]
        return mx.concatenate([buffer[:, :, : self.keep], buffer[:, :, count + self.keep :]], axis=2)
