"""What every key/value cache offers to a layer and to the loop."""

from dataclasses import dataclass
from typing import Protocol, Self

import mlx.core as mx

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


class KVCache(Protocol):
    """A value that holds the keys and values of one layer.

    Attributes:
        offset: Tokens ever appended.
        kind: Its kind in words that an oracle can be compared by: `plain`, `quantized-b8-g64`.
    """

    @property
    def offset(self) -> int:
        """Tokens ever appended; the position of the next token."""
        ...

    @property
    def kind(self) -> str:
        """`plain`, `quantized-b8-g64`."""
        ...

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays that it holds, for evaluation and for counting bytes."""
        ...

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple[Self, Heads, Heads]:
        """The cache with L more positions, and the keys and values of all positions so far."""
        ...


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
