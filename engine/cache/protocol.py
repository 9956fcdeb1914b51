"""What every cache offers to a layer and to the loop, and how a buffer of positions grows."""

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import mlx.core as mx

from engine.mask import Mask, causal_matrix

SLAB = 256  # positions by which a buffer grows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedHeads:
    """Keys or values of all heads, affine-packed along the head's width.

    Attributes:
        weight: uint32 words [B, K, T, E * bits / 32].
        scales: [B, K, T, E / group_size], in the dtype that was packed.
        biases: [B, K, T, E / group_size].
        bits: Width of an element.
        group_size: Elements that share a scale and a bias.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int


Heads = mx.array | PackedHeads


class Cache(Protocol):
    """What one layer remembers, whatever that is; a value that is replaced, never changed."""

    @property
    def offset(self) -> int:
        """Tokens ever appended; the position of the next token."""
        ...

    @property
    def kind(self) -> str:
        """Its kind, in words that an oracle can be compared by: `plain`, `quantized-b8-g64`, `rotating-w512-k0`."""
        ...

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays that it holds, for evaluation and for counting bytes."""
        ...


@runtime_checkable
class KVCache(Cache, Protocol):
    """A cache of keys and values by position."""

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple[Self, Heads, Heads]:
        """The cache with L more positions, and the keys and values that a query may now attend to."""
        ...

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over what `append` will return.

        Args:
            L: New positions.
            window: A query sees at most this many positions, itself included.
            as_array: Give a boolean matrix where the word `causal` would do.
        """
        ...


def as_kv(cache: Cache) -> KVCache:
    """The same cache, known to hold keys and values.

    Raises:
        TypeError: It does not; the family handed a layer the wrong kind.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"a layer of attention was handed a cache of kind {cache.kind}")
    return cache


def grown(buffer: mx.array | None, used: int, new_BKLE: mx.array) -> mx.array:
    """`buffer` with `new_BKLE` written at position `used`, enlarged by whole slabs where it does not fit.

    Args:
        buffer: [B, K, capacity, E], or None before the first append.
        used: Positions in use.
        new_BKLE: [B, K, L, E], in the buffer's dtype.

    Returns:
        A new array; `buffer` itself is never written (mlx reuses its memory when nobody else holds it).

    Source: spec/kv.md section 1: a buffer that must grow is first cut to what is used, then gains ceil(L/256) slabs.
    """
    B, K, L, E = new_BKLE.shape
    if buffer is None or used + L > buffer.shape[2]:
        slabs = mx.zeros((B, K, -(-L // SLAB) * SLAB, E), dtype=new_BKLE.dtype)
        buffer = slabs if buffer is None else mx.concatenate([buffer[:, :, :used], slabs], axis=2)
    return mx.slice_update(buffer, new_BKLE, mx.array([used]), axes=(2,))


def growing_mask(L: int, *, offset: int, window: int | None, as_array: bool) -> Mask:
    """The mask of a cache that keeps every position: none for a single query without a window, else causal."""
    if window is not None:
        return causal_matrix(L, before=offset, window=window)
    if L == 1:
        return None
    return causal_matrix(L, before=offset) if as_array else "causal"
