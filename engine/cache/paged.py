"""The paged cache: keys and values in blocks of a pool, named by a table, for attention the same bits as the plain cache.

The pool is as large as it will ever be from the first append on: memory is claimed once and never copied to grow. Free blocks
are a stack: what was given back last is taken first. One sequence a cache; like every cache it is a value, so a fork shares the
pool until one of the two appends.

Source: spec/kv.md section 7; Kwon et al. 2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, check_trim, growing_mask
from engine.errors import RequestError
from engine.mask import Mask

BLOCK: Final = 256  # positions a block, where nothing else is asked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedCache:
    """Keys and values of one sequence.

    Attributes:
        block_size: Positions a block.
        free: Blocks that nothing is in; the last one is taken next.
        table: The sequence's blocks, in order.
        keys: Pool [blocks, K, block_size, E], or None before the first append.
        values: Pool [blocks, K, block_size, E], or None before the first append.
        offset: Positions in use.
    """

    block_size: int
    free: tuple[int, ...]
    table: tuple[int, ...] = ()
    keys: mx.array | None = None
    values: mx.array | None = None
    offset: int = 0

    @classmethod
    def empty(cls, *, blocks: int, block_size: int = BLOCK) -> "PagedCache":
        """A cache of so many free blocks, of which block 0 is taken first.

        Raises:
            RequestError: There is no block, or no position in one.
        """
        if min(blocks, block_size) < 1:
            raise RequestError(
                "a paged cache needs a block, and a block a position",
                blocks=blocks,
                block_size=block_size,
                next_step="use 1 or more of each",
            )
        return cls(block_size=block_size, free=tuple(reversed(range(blocks))))

    @property
    def blocks(self) -> int:
        """Blocks of the pool, free or not."""
        return len(self.free) + len(self.table)

    @property
    def kind(self) -> str:
        """Such as `paged-b256`."""
        return f"paged-b{self.block_size}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The two pools, or nothing before the first append."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["PagedCache", mx.array, mx.array]:
        """Add L positions; returns the new cache and [1, K, T, E] of all T positions so far, gathered from the blocks.

        Numerics: none; bits are stored as they come.

        Raises:
            RequestError: The pool has not as many free blocks, or there is more than one sequence.
        """
        B, _, L, _ = keys_BKLE.shape
        if B != 1:
            raise RequestError("a paged cache holds one sequence", rows=B, next_step="use a plain or a batch cache")
        table, free = self._claimed(L)
        end = self.offset + L
        keys, values = (
            self._written(pool, table, new) for pool, new in ((self.keys, keys_BKLE), (self.values, values_BKLE))
        )
        new = replace(self, table=table, free=free, keys=keys, values=values, offset=end)
        return new, _gathered(keys, table)[:, :, :end], _gathered(values, table)[:, :, :end]

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over all so far."""
        return growing_mask(L, offset=self.offset, window=window, as_array=as_array)

    @property
    def trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> "PagedCache":
        """The cache without its last `n` tokens; blocks that hold none any more are free again, the first of them on top.

        Raises:
            RequestError: It holds fewer.
        """
        check_trim(self, n)
        offset = self.offset - n
        kept = -(-offset // self.block_size)
        return replace(self, offset=offset, table=self.table[:kept], free=self.free + self.table[kept:][::-1])

    def _claimed(self, L: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The table with as many blocks as L more positions need, and what is free after that."""
        needed = -(-(self.offset + L) // self.block_size)
        left = len(self.free) - (needed - len(self.table))
        if left < 0:
            raise RequestError(
                "the pool of the paged cache is exhausted",
                blocks=self.blocks,
                block_size=self.block_size,
                holds=self.offset,
                tokens=L,
                next_step=f"make it of at least {needed} blocks",
            )
        return self.table + self.free[left:][::-1], self.free[:left]

    def _written(self, pool: mx.array | None, table: Sequence[int], new_BKLE: mx.array) -> mx.array:
        """The pool with new positions in the blocks that the table names for them."""
        _, K, L, E = new_BKLE.shape
        if pool is None:
            pool = mx.zeros((self.blocks, K, self.block_size, E), dtype=new_BKLE.dtype)
        at = 0
        while at < L:
            place, within = divmod(self.offset + at, self.block_size)
            count = min(L - at, self.block_size - within)
            piece = new_BKLE[:, :, at : at + count]
            pool = mx.slice_update(pool, piece, mx.array([table[place], within]), axes=(0, 2))
            at += count
        return pool


def _gathered(pool: mx.array, table: Sequence[int]) -> mx.array:
    """The table's blocks one after the other, [1, K, blocks * block_size, E]."""
    blocks_NKSE = mx.take(pool, mx.array(tuple(table)), axis=0)
    N, K, S, E = blocks_NKSE.shape
    return blocks_NKSE.swapaxes(0, 1).reshape(1, K, N * S, E)


def paged(caches: Sequence[Cache], *, tokens: int, block_size: int = BLOCK) -> tuple[Cache, ...]:
    """A model's empty caches, each plain one paged, with room for so many tokens.

    Args:
        caches: As the model makes them. Rings and states are bounded anyway and stay as they are.
        tokens: Prompt and all that follows.
        block_size: Positions a block.

    Raises:
        RequestError: None is plain, one is not empty, or there is no room for a token.
    """
    if not any(isinstance(cache, PlainCache) for cache in caches) or any(cache.offset for cache in caches):
        raise RequestError(
            "the model's caches cannot be paged",
            kinds=", ".join(dict.fromkeys(cache.kind for cache in caches)) or "none",
            tokens=max((cache.offset for cache in caches), default=0),
            next_step="page a model's own empty caches, of which at least one is plain",
        )
    blocks = -(-tokens // block_size) if block_size > 0 else 0
    return tuple(
        PagedCache.empty(blocks=blocks, block_size=block_size) if isinstance(cache, PlainCache) else cache
        for cache in caches
    )
