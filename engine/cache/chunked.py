"""The chunked cache: plain keys and values, of which a layer with chunks of attention may drop the front.

Nothing is dropped by itself: the layer calls `trim_front` before a forward, as the oracle's models do, and until then the cache
is a plain one. Source: spec/kv.md section 1 (growth); spec/oracles.md section 2.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import check_trim, growing_mask, grown
from engine.errors import RequestError
from engine.mask import Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedCache:
    """Keys and values from a position on.

    Attributes:
        chunk_size: Positions that `trim_front` leaves, at most.
        start: Position of the first one that is held.
        keys: Buffer [B, K, capacity, E], or None while empty.
        values: Buffer [B, K, capacity, E], or None while empty.
        offset: Tokens ever appended.
    """

    chunk_size: int
    start: int = 0
    keys: mx.array | None = None
    values: mx.array | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        """Refuse a chunk of nothing.

        Raises:
            RequestError: It is.
        """
        if self.chunk_size < 1:
            raise RequestError(
                "a chunk needs at least one position", chunk_size=self.chunk_size, next_step="use 1 or more"
            )

    @property
    def held(self) -> int:
        """Positions that are held."""
        return self.offset - self.start

    @property
    def kind(self) -> str:
        """Such as `chunked-c8192`."""
        return f"chunked-c{self.chunk_size}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The two buffers, or nothing while empty."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["ChunkedCache", mx.array, mx.array]:
        """Add L positions; returns the new cache and views [B, K, T, E] of all T positions that it holds.

        Numerics: none; bits are stored as they come.
        """
        keys = grown(self.keys, self.held, keys_BKLE)
        values = grown(self.values, self.held, values_BKLE)
        new = replace(self, keys=keys, values=values, offset=self.offset + keys_BKLE.shape[2])
        return new, keys[:, :, : new.held], values[:, :, : new.held]

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over all that are held."""
        return growing_mask(L, offset=self.held, window=window, as_array=as_array)

    def trim_front(self) -> "ChunkedCache":
        """The cache with its last `chunk_size` positions alone; itself where it holds no more."""
        drop = self.held - self.chunk_size
        if drop <= 0 or self.keys is None or self.values is None:
            return self
        keys, values = (mx.contiguous(array[:, :, drop : self.held]) for array in (self.keys, self.values))
        return replace(self, start=self.start + drop, keys=keys, values=values)

    @property
    def trimmable(self) -> bool:
        """Always, as far back as the front that was dropped."""
        return True

    def trim(self, n: int) -> "ChunkedCache":
        """The cache without its last `n` tokens.

        Raises:
            RequestError: It holds fewer.
        """
        check_trim(self, n, held=self.held)
        return replace(self, offset=self.offset - n)
