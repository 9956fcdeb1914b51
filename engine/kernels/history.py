"""Keys and values of a sequence on the fused level: slabs of positions that forks share, and the caches that stand for them.

Guarantees: a cache is a value: what an old one sees is never written again. A slab is appended to in place by whoever holds its
newest end; whoever continues from an older place gets a copy of that slab, and shares the full ones before it. `plain` gives
the cache of `engine.cache` that holds the same bits, wherever something other than the fused step is to go on.
"""

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.cache.plain import PlainCache
from engine.cache.protocol import Heads, check_trim
from engine.cache.quantized import EmptyQuantizedCache, QuantizedCache
from engine.cache.rotating import RotatingCache
from engine.kernels.arena import LINE
from engine.kernels.codes import packed_heads
from engine.kernels.fields import SLAB
from engine.mask import Mask

if TYPE_CHECKING:
    from collections.abc import Callable

Floats = npt.NDArray[np.float32]
StoodFor = PlainCache | RotatingCache | QuantizedCache | EmptyQuantizedCache

_CLAIM: Final = threading.Lock()
_PACK: Final = threading.Lock()


def aligned(count: int) -> Floats:
    """Zeros that begin on a line of the processor's cache."""
    memory = np.zeros(count + LINE // 4, np.float32)
    first = -(memory.__array_interface__["data"][0] // 4) % (LINE // 4)
    return memory[first : first + count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a slab is laid out.

    Keys are [layers, groups, SLAB / columns, width, columns]; values, behind them, [layers, groups, blocks, SLAB, columns].
    Where they are packed, these are what codes stand for; behind them are scales and biases of keys and values,
    [layers, groups, SLAB, 2, shares, 2], and codes [layers, groups, SLAB, 2, width], a byte each.

    Attributes:
        layers: How many.
        groups: Heads of keys and values.
        width: Elements of a head.
        columns: Of a product's block.
        dtype: Of the model; slabs are float32, which holds it exactly.
        bits: Width of a code; 0 where keys and values are kept as computed.
        group_size: Elements that share a scale and a bias.
        base: The geometry of the same model's plain slabs; None in that one itself.
    """

    layers: int
    groups: int
    width: int
    columns: int
    dtype: mx.Dtype
    bits: int = 0
    group_size: int = 0
    base: "Geometry | None" = None

    @property
    def blocks(self) -> int:
        """Blocks of columns that a head takes."""
        return -(-self.width // self.columns)

    @property
    def key_floats(self) -> int:
        """Floats of a slab's keys."""
        return self.layers * self.groups * self.width * SLAB

    @property
    def scales_at(self) -> int:
        """Floats of a slab's keys and values."""
        return self.key_floats + self.layers * self.groups * self.blocks * self.columns * SLAB

    @property
    def codes_at(self) -> int:
        """Floats of a slab before its codes."""
        shares = self.width // self.group_size if self.bits else 0
        return self.scales_at + self.layers * self.groups * SLAB * 4 * shares

    @property
    def floats(self) -> int:
        """Floats of a slab."""
        return self.codes_at + (self.layers * self.groups * SLAB * 2 * self.width // 4 if self.bits else 0)

    def keys(self, memory: Floats, layer: int) -> Floats:
        """A layer's keys in a slab, [groups, SLAB, width]."""
        kept = memory[: self.key_floats].reshape(self.layers, self.groups, -1, self.width, self.columns)[layer]
        keys: Floats = kept.swapaxes(2, 3).reshape(self.groups, SLAB, self.width)
        return keys

    def values(self, memory: Floats, layer: int) -> Floats:
        """A layer's values in a slab, [groups, SLAB, width]."""
        kept = memory[self.key_floats : self.scales_at].reshape(
            self.layers, self.groups, self.blocks, SLAB, self.columns
        )[layer]
        values: Floats = kept.swapaxes(1, 2).reshape(self.groups, SLAB, -1)[:, :, : self.width]
        return values


@dataclass(slots=True, kw_only=True, eq=False)
class Slab:
    """Memory for `SLAB` positions of all layers.

    Attributes:
        memory: Zeros, but for the positions that were written.
        filled: Positions that somebody has written or is about to.
    """

    memory: Floats
    filled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """What all layers remember of a sequence.

    Attributes:
        geometry: How slabs are laid out.
        slabs: In order.
        offset: Positions so far.
        pack: From a history of plain keys and values, bits and a group size to the same packed; None where it cannot be.
    """

    geometry: Geometry
    slabs: tuple[Slab, ...] = ()
    offset: int = 0
    pack: "Callable[[History, int, int], History | None] | None" = None
    _packed: "dict[tuple[int, int], History | None]" = field(default_factory=dict, init=False)

    def extended(self, by: int) -> "History":
        """The history with room for `by` positions more, which nobody else will write to."""
        slabs, end = list(self.slabs), self.offset + by
        used = self.offset % SLAB
        if used:
            with _CLAIM:
                if slabs[-1].filled != used:  # another branch went on from here
                    slabs[-1] = Slab(memory=_copy(slabs[-1].memory), filled=used)
                slabs[-1].filled = min(SLAB, used + by)
        while len(slabs) * SLAB < end:
            filled = min(SLAB, end - len(slabs) * SLAB)
            slabs.append(Slab(memory=aligned(self.geometry.floats), filled=filled))
        return replace(self, slabs=tuple(slabs), offset=end)

    def shortened(self, by: int) -> "History":
        """The history without its last `by` positions; what it sees stays shared."""
        offset = self.offset - by
        return replace(self, slabs=self.slabs[: -(-offset // SLAB)], offset=offset)

    def packed(self, bits: int, group_size: int) -> "History | None":
        """The same history packed, one for all layers that ask; None where the fused step cannot keep it so."""
        if self.pack is None:
            return None
        with _PACK:
            if (bits, group_size) not in self._packed:
                self._packed[bits, group_size] = self.pack(self, bits, group_size)
            return self._packed[bits, group_size]

    def is_same(self, other: "History") -> bool:
        """Whether both see the same positions of the same memory."""
        return (self.geometry is other.geometry and self.offset == other.offset) and all(
            a is b for a, b in zip(self.slabs, other.slabs, strict=True)
        )

    def heads(self, layer: int) -> tuple[Floats, Floats]:
        """A layer's keys and values, [groups, offset, width] each."""
        keys, values = (
            np.concatenate([view(slab.memory, layer) for slab in self.slabs], axis=1)[:, : self.offset]
            for view in (self.geometry.keys, self.geometry.values)
        )
        return keys, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Which positions a ring holds, and in which order; see `engine.cache.rotating`.

    Attributes:
        max_size: Positions kept.
        held: Positions in it, more than `max_size` after several at once.
        index: Where the next single position is written; places before it hold the newest ones.
    """

    max_size: int
    held: int = 0
    index: int = 0

    def advanced(self, by: int) -> "Ring":
        """The ring with `by` more positions."""
        if by > 1:
            held = min(self.held, self.max_size - 1) + by
            return replace(self, held=held, index=held)
        if self.held < self.max_size:
            return replace(self, held=self.held + 1, index=self.held + 1)
        wraps = self.held > self.max_size or self.index == self.max_size
        return replace(self, held=self.max_size, index=1 if wraps else self.index + 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedCache:
    """One layer's share of a history.

    Attributes:
        history: Of all layers.
        layer: Which.
        ring: Where the layer has a window.
    """

    history: History
    layer: int
    ring: Ring | None = None
    _plain: list[StoodFor] = field(default_factory=list)

    @property
    def offset(self) -> int:
        """Tokens ever appended."""
        return self.history.offset

    @property
    def kind(self) -> str:
        """That of the cache that it stands for."""
        return self._empty().kind

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """None: nothing of it is mlx's, and nothing is left to be evaluated."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's share."""
        return sum(slab.memory.nbytes for slab in self.history.slabs) // self.history.geometry.layers

    @property
    def trimmable(self) -> bool:
        """Unless the layer's ring has come round: the cache that it stands for has lost what was overwritten."""
        return self.ring is None or self.offset < self.ring.max_size

    def trim(self, n: int) -> "FusedCache":
        """The cache without its last `n` tokens.

        Raises:
            RequestError: It has come round, or holds fewer.
        """
        check_trim(self, n)
        ring = self.ring
        ring = ring if ring is None else replace(ring, held=ring.held - n, index=ring.index - n)
        return FusedCache(history=self.history.shortened(n), layer=self.layer, ring=ring)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple[StoodFor, Heads, Heads]:
        """What the cache that it stands for does: a layer that is handed this one goes on without the fused step."""
        return self.plain().append(keys_BKLE, values_BKLE)

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of the cache that it stands for."""
        return self.plain().mask(L, window=window, as_array=as_array)

    def packed(self, *, bits: int, group_size: int) -> "FusedCache | None":
        """The layer's share of the packed history; itself where it is one already."""
        if self.history.geometry.bits:
            return self
        history = self.history.packed(bits, group_size)
        return None if history is None else FusedCache(history=history, layer=self.layer)

    def plain(self) -> StoodFor:
        """The cache that holds the same bits in mlx's arrays."""
        if not self._plain:
            self._plain.append(self._made())
        return self._plain[0]

    def _empty(self) -> StoodFor:
        geometry = self.history.geometry
        if geometry.bits:
            return EmptyQuantizedCache(bits=geometry.bits, group_size=geometry.group_size)
        return PlainCache() if self.ring is None else RotatingCache(max_size=self.ring.max_size)

    def _made(self) -> StoodFor:
        if not self.offset:
            return self._empty()
        dtype, offset, ring = self.history.geometry.dtype, self.offset, self.ring
        if self.history.geometry.bits:
            packed_keys, packed_values = packed_heads(self.history, self.layer)
            return QuantizedCache(keys=packed_keys, values=packed_values, offset=offset)
        keys, values = self.history.heads(self.layer)
        if ring is None:
            return PlainCache(keys=_array(keys, dtype), values=_array(values, dtype), offset=offset)
        order: Any = np.arange(offset - ring.held, offset)
        order = np.concatenate([order[ring.held - ring.index :], order[: ring.held - ring.index]])
        return RotatingCache(
            max_size=ring.max_size,
            keys=_array(keys[:, order], dtype),
            values=_array(values[:, order], dtype),
            offset=offset,
            index=ring.index,
        )


def _array(heads: Floats, dtype: mx.Dtype) -> mx.array:
    return mx.array(heads[None]).astype(dtype)


def _copy(memory: Floats) -> Floats:
    copy = aligned(memory.size)
    copy[:] = memory
    return copy
