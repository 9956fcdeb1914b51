"""The plain cache: keys and values as computed, in a buffer that grows by slabs of 256 positions."""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import check_trim, growing_mask, grown
from engine.mask import Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainCache:
    """Keys and values as computed.

    Attributes:
        keys: Buffer [B, K, capacity, E], or None while empty.
        values: Buffer [B, K, capacity, E], or None while empty.
        offset: Positions in use.
    """

    keys: mx.array | None = None
    values: mx.array | None = None
    offset: int = 0

    @property
    def kind(self) -> str:
        """`plain`."""
        return "plain"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The two buffers, or nothing while empty."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["PlainCache", mx.array, mx.array]:
        """Add L positions; returns the new cache and views [B, K, T, E] of all T positions so far.

        Numerics: none; bits are stored as they come.
        """
        keys = grown(self.keys, self.offset, keys_BKLE)
        values = grown(self.values, self.offset, values_BKLE)
        end = self.offset + keys_BKLE.shape[2]
        return replace(self, keys=keys, values=values, offset=end), keys[:, :, :end], values[:, :, :end]

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over all so far."""
        return growing_mask(L, offset=self.offset, window=window, as_array=as_array)

    @property
    def trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> "PlainCache":
        """The cache without its last `n` tokens.

        Raises:
            RequestError: It holds fewer.
        """
        check_trim(self, n)
        return replace(self, offset=self.offset - n)
