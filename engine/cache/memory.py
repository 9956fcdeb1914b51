"""Bytes of keys and values, as formulas: what a token costs and what a context costs, in every KV mode.

`live` bytes are those of positions in use; buffers are allocated in slabs, so arrays are larger (`allocated_positions`).
Sizes of a model come from a forward of one token that is laid out and never run.

Guarantees: integers, and equal to the bytes of real arrays (tests/engine/cache/test_memory.py). Formulas describe caches as
they settle: a ring that several positions were just appended to is longer until the next single one.
Source: spec/kv.md section 11.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from engine.cache.convert import KVMode
from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import SLAB, Cache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache


class Sized(Protocol):
    """What is needed of a model."""

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches for a new sequence."""
        ...

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states and the longer caches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one cache holds.

    Attributes:
        heads: K; 0 where there are no keys and values.
        key_width: Elements of a key.
        value_width: Elements of a value.
        itemsize: Bytes of an element as computed: 2 or 4.
        window: Positions that a ring keeps; None where all are kept.
        state: Bytes that do not depend on the number of tokens.
        packable: Whether a KV mode may pack or replace it: it stands in no group.
    """

    heads: int = 0
    key_width: int = 0
    value_width: int = 0
    itemsize: int = 2
    window: int | None = None
    state: int = 0
    packable: bool = True


def head_bytes(elements: int, *, itemsize: int, width: tuple[int, int] | None = None) -> int:
    """Bytes of one head of one position.

    Args:
        elements: Of the head.
        itemsize: Bytes of an element as computed; scales and biases have it too.
        width: (bits, group size) where it is packed.
    """
    if width is None:
        return elements * itemsize
    bits, group_size = width
    return elements * bits // 8 + 2 * (elements // group_size) * itemsize


def token_bytes(shape: CacheShape, width: tuple[int, int] | None = None) -> int:
    """Bytes of one position in one cache, keys and values."""
    return shape.heads * sum(
        head_bytes(elements, itemsize=shape.itemsize, width=width) for elements in (shape.key_width, shape.value_width)
    )


def live_bytes(shapes: Sequence[Sequence[CacheShape]], mode: KVMode, tokens: int) -> int:
    """Bytes of all positions in use after `tokens` tokens, every cache converted that the mode converts.

    Args:
        shapes: From `shapes_of`.
        mode: The KV mode.
        tokens: Tokens seen.
    """
    total = 0
    for place, members in enumerate(shapes):
        for shape in members:
            width = mode.width(place) if shape.packable and tokens >= mode.start else None
            ring = mode.max_size if shape.packable and shape.window is None else shape.window
            held = tokens if ring is None else min(tokens, ring)
            total += shape.state + held * token_bytes(shape, width)
    return total


def marginal_bytes(shapes: Sequence[Sequence[CacheShape]], mode: KVMode, tokens: int = 0) -> int:
    """Bytes that the next token adds after `tokens` tokens; rings that are full add none.

    Conversion is taken to have happened: the step at which a start is reached is not counted as growth.
    """
    return live_bytes(shapes, _converted(mode), tokens + 1) - live_bytes(shapes, _converted(mode), tokens)


def allocated_positions(appends: Sequence[int]) -> int:
    """Positions in the buffer of a growing cache after appends of these lengths, from empty.

    Source: spec/kv.md section 1: a buffer that must grow is cut to what is used, then gains whole slabs.
    """
    used = capacity = 0
    for length in appends:
        if used + length > capacity:
            capacity = used + -(-length // SLAB) * SLAB
        used += length
    return capacity


def shapes_of(model: Sized) -> tuple[tuple[CacheShape, ...], ...]:
    """For each cache of a model the shapes of its members, one where it is no group.

    A forward of one token is laid out for its shapes and dtypes; nothing of it is computed where mlx is lazy.
    """
    _, caches = model.hidden(mx.array([[0]]), model.make_caches())
    return tuple(_shapes(cache, packable=True) for cache in caches)


def _converted(mode: KVMode) -> KVMode:
    return KVMode(
        bits=mode.bits, group_size=mode.group_size, layers=mode.layers, max_size=mode.max_size, keep=mode.keep
    )


def _shapes(cache: Cache, *, packable: bool) -> tuple[CacheShape, ...]:
    if isinstance(cache, CacheGroup):
        return tuple(shape for member in cache.members for shape in _shapes(member, packable=False))
    if isinstance(cache, RecurrentCache):
        return (CacheShape(state=sum(array.nbytes for array in cache.arrays), packable=False),)
    if isinstance(cache, PlainCache | RotatingCache) and cache.keys is not None and cache.values is not None:
        return (
            CacheShape(
                heads=cache.keys.shape[1],
                key_width=cache.keys.shape[3],
                value_width=cache.values.shape[3],
                itemsize=cache.keys.itemsize,
                window=cache.max_size if isinstance(cache, RotatingCache) else None,
                packable=packable,
            ),
        )
    raise TypeError(f"no formula for a cache of kind {cache.kind}")
