"""The uniformly quantised cache: keys and values affine-packed along the head's width as they are appended.

Widths 2 3 4 5 6 8, groups of 32 64 128. Grows as the plain cache does. It is born by conversion of a plain cache
(`engine.cache.convert`), as in the oracle, and packs only what is appended after; or it begins empty.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import PackedHeads, Tiling, check_trim, growing_mask, grown
from engine.mask import Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedCache:
    """Keys and values packed.

    Attributes:
        keys: Buffers of capacity T.
        values: Buffers of capacity T.
        offset: Positions in use.
    """

    keys: PackedHeads
    values: PackedHeads
    offset: int

    @property
    def kind(self) -> str:
        """Such as `quantized-b8-g64`."""
        return f"quantized-b{self.keys.bits}-g{self.keys.group_size}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Words, scales and biases of keys, then of values."""
        return tuple(
            array for heads in (self.keys, self.values) for array in (heads.weight, heads.scales, heads.biases)
        )

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["QuantizedCache", PackedHeads, PackedHeads]:
        """Pack L positions and add them; returns the new cache and views of all T positions so far.

        Numerics: scales and biases are rounded to the dtype of what is packed.
        Source: spec/kv.md section 3.
        """
        end = self.offset + keys_BKLE.shape[2]
        keys = _append(self.keys, self.offset, keys_BKLE)
        values = _append(self.values, self.offset, values_BKLE)
        return replace(self, keys=keys, values=values, offset=end), _first(keys, end), _first(values, end)

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over all so far."""
        return growing_mask(L, offset=self.offset, window=window, as_array=as_array)

    @property
    def trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> "QuantizedCache":
        """The cache without its last `n` tokens.

        Raises:
            RequestError: It holds fewer.
        """
        check_trim(self, n)
        return replace(self, offset=self.offset - n)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmptyQuantizedCache:
    """A quantised cache before its first positions, which it packs too.

    Attributes:
        bits: Width of a stored element.
        group_size: Elements of a head that share a scale and a bias.
        tiling: Tiles of attention, or None.
    """

    bits: int
    group_size: int
    tiling: Tiling | None = None

    @property
    def offset(self) -> int:
        """0."""
        return 0

    @property
    def kind(self) -> str:
        """Such as `quantized-b8-g64`."""
        return f"quantized-b{self.bits}-g{self.group_size}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """None yet."""
        return ()

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple[QuantizedCache, PackedHeads, PackedHeads]:
        """Pack the first L positions into slabs of their own; returns the cache that holds them, and views of them."""
        keys, values = (self._slabs(heads) for heads in (keys_BKLE, values_BKLE))
        end = keys_BKLE.shape[2]
        return QuantizedCache(keys=keys, values=values, offset=end), _first(keys, end), _first(values, end)

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of the first L positions."""
        return growing_mask(L, offset=0, window=window, as_array=as_array)

    @property
    def trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> "EmptyQuantizedCache":
        """Itself, for no token at all.

        Raises:
            RequestError: `n` is not 0.
        """
        check_trim(self, n)
        return self

    def _slabs(self, heads_BKLE: mx.array) -> PackedHeads:
        packed = pack(heads_BKLE, bits=self.bits, group_size=self.group_size, tiling=self.tiling)
        return replace(
            packed,
            weight=grown(None, 0, packed.weight),
            scales=grown(None, 0, packed.scales),
            biases=grown(None, 0, packed.biases),
        )


def pack(heads_BKTE: mx.array, *, bits: int, group_size: int, tiling: Tiling | None = None) -> PackedHeads:
    """Affine-pack along the last axis."""
    weight, scales, biases = mx.quantize(heads_BKTE, group_size=group_size, bits=bits)
    return PackedHeads(weight=weight, scales=scales, biases=biases, bits=bits, group_size=group_size, tiling=tiling)


def _append(heads: PackedHeads, used: int, new_BKLE: mx.array) -> PackedHeads:
    new = pack(new_BKLE, bits=heads.bits, group_size=heads.group_size)
    return replace(
        heads,
        weight=grown(heads.weight, used, new.weight),
        scales=grown(heads.scales, used, new.scales),
        biases=grown(heads.biases, used, new.biases),
    )


def _first(heads: PackedHeads, end: int) -> PackedHeads:
    return replace(
        heads,
        weight=heads.weight[:, :, :end],
        scales=heads.scales[:, :, :end],
        biases=heads.biases[:, :, :end],
    )
