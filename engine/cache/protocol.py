"""What every cache offers to a layer and to the loop, and how a buffer of positions grows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self, cast, runtime_checkable

import mlx.core as mx

from engine.errors import RequestError
from engine.mask import Mask, causal_matrix

SLAB = 256  # positions by which a buffer grows


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How attention over packed keys goes through its positions: in tiles (`engine.tiled_attention`).

    Attributes:
        size: Positions a tile.
        lifted: Queries in float32 are tiled too; the oracle as it is released tiles 16-bit ones alone.
    """

    size: int = 512
    lifted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedHeads:
    """Keys or values of all heads, affine-packed along the head's width.

    Attributes:
        weight: uint32 words [B, K, T, E * bits / 32].
        scales: [B, K, T, E / group_size], in the dtype that was packed.
        biases: [B, K, T, E / group_size].
        bits: Width of an element.
        group_size: Elements that share a scale and a bias.
        tiling: Tiles in which a query goes through them; None for all positions at once.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int
    tiling: Tiling | None = None


@runtime_checkable
class CodedHeads(Protocol):
    """Keys in a code of their own, which know how queries attend to them (`engine.turboquant`)."""

    def attend(self, q_BHLE: mx.array, values: "Heads", *, scale: float, mask: Mask) -> mx.array:
        """softmax(scale * q k^T + mask) v, [B, H, L, E] in q's dtype."""
        ...


Heads = mx.array | PackedHeads | CodedHeads


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

    @property
    def trimmable(self) -> bool:
        """Whether its last tokens can be forgotten: nothing that they replaced is lost."""
        ...

    def trim(self, n: int) -> Self:
        """The cache without its last `n` tokens; appending them again gives the bits of a cache that never lost them.

        Raises:
            RequestError: It is not trimmable, or holds fewer tokens.
        """
        ...


@runtime_checkable
class Batched(Protocol):
    """A cache whose rows have positions of their own."""

    @property
    def rows(self) -> int:
        """B."""
        ...

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """Position of each row's next token; below 0 while the row is still in its left padding."""
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


@runtime_checkable
class StandIn(Protocol):
    """A cache that stands for one of another kind, and holds the same bits elsewhere."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, none of them in mlx's arrays."""
        ...

    def plain(self) -> Cache:
        """The cache that it stands for."""
        ...

    def packed(self, *, bits: int, group_size: int) -> Cache | None:
        """A stand-in for the cache that it stands for, packed; None where only that cache itself can be packed."""
        ...


def settled(caches: Sequence[Cache]) -> tuple[Cache, ...]:
    """Caches without stand-ins: for whoever looks into a cache, such as packing or saving."""
    return tuple(as_stand_in.plain() if (as_stand_in := stand_in(cache)) else cache for cache in caches)


def stand_in(cache: Cache) -> StandIn | None:
    """The same cache, known to be a stand-in; None where it is none."""
    return cast("StandIn", cache) if _offers(cache, StandIn) else None


def held_bytes(cache: Cache) -> int:
    """Bytes that a cache holds, in mlx's arrays or elsewhere."""
    standing = stand_in(cache)
    return sum(array.nbytes for array in cache.arrays) if standing is None else standing.nbytes


def as_kv(cache: Cache) -> KVCache:
    """The same cache, known to hold keys and values.

    Raises:
        TypeError: It does not; the family handed a layer the wrong kind.
    """
    if not _offers(cache, KVCache):
        raise TypeError(f"a layer of attention was handed a cache of kind {cache.kind}")
    return cast("KVCache", cache)


def positions(cache: Cache) -> int | mx.array:
    """Position of the next token, as a rotation takes it: one for all, or one a row, int32 [B], in a batch."""
    return mx.array(cast("Batched", cache).row_offsets) if _offers(cache, Batched) else cache.offset


_KNOWN: Final[dict[tuple[type, type], bool]] = {}


def _offers(cache: Cache, protocol: type) -> bool:
    """`isinstance`, asked once for each class: what a cache offers is up to its class, and every layer of every step asks."""
    key = (type(cache), protocol)
    if key not in _KNOWN:
        _KNOWN[key] = isinstance(cache, protocol)
    return _KNOWN[key]


def check_trim(cache: Cache, n: int, *, held: int | None = None) -> None:
    """Refuse to forget what a cache cannot forget.

    Args:
        cache: Any kind.
        n: Tokens to forget.
        held: Tokens that it can lose at most; its offset by default.

    Raises:
        RequestError: It is not trimmable, or `n` is below 0 or above `held`.
    """
    held = cache.offset if held is None else held
    if not cache.trimmable and n:
        raise RequestError(
            "the cache cannot forget its last tokens",
            kind=cache.kind,
            tokens=n,
            reason="what they replaced is gone",
            next_step="keep the cache as it was before them, or compute it again",
        )
    if not 0 <= n <= held:
        raise RequestError(
            "the cache does not hold as many tokens as it is to forget",
            kind=cache.kind,
            holds=held,
            tokens=n,
            next_step=f"forget 0 to {held}",
        )


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
