"""The packed ring: a rotating cache whose keys and values are affine-packed as they are appended.

Words, scales and biases are three rings that turn alike: positions are moved, dropped and overwritten along the axis of
tokens alone, so a group of packed elements is never cut. It begins empty, or by conversion of a plain ring as it lies,
turned or not; a turned ring laid out as one that grows would claim more positions than it has.

Source: spec/kv.md sections 2 and 4.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import PackedHeads, Tiling, check_trim
from engine.cache.quantized import pack
from engine.cache.rotating import RotatingCache
from engine.mask import Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RotatingQuantizedCache:
    """A ring of packed keys and values.

    Attributes:
        weight: The uint32 words.
        scales: One a group.
        biases: One a group.
        bits: Width of an element.
        group_size: Elements of a head that share a scale and a bias.
        tiling: Tiles of attention, or None.
    """

    weight: RotatingCache
    scales: RotatingCache
    biases: RotatingCache
    bits: int
    group_size: int
    tiling: Tiling | None = None

    @classmethod
    def empty(
        cls, *, max_size: int, keep: int = 0, bits: int, group_size: int, tiling: Tiling | None = None
    ) -> "RotatingQuantizedCache":
        """A ring without positions."""
        ring = RotatingCache(max_size=max_size, keep=keep)
        return cls(weight=ring, scales=ring, biases=ring, bits=bits, group_size=group_size, tiling=tiling)

    @classmethod
    def of(
        cls, ring: RotatingCache, *, bits: int, group_size: int, tiling: Tiling | None = None
    ) -> "RotatingQuantizedCache":
        """A plain ring packed as it lies: same places, same next place, same tokens seen.

        Numerics: scales and biases are rounded to the dtype of what is packed.
        """
        if ring.keys is None or ring.values is None:
            rings = (ring, ring, ring)
        else:
            packed = (pack(heads, bits=bits, group_size=group_size) for heads in (ring.keys, ring.values))
            keys, values = (_parts(heads) for heads in packed)
            w, s, b = (replace(ring, keys=k, values=v) for k, v in zip(keys, values, strict=True))
            rings = (w, s, b)
        weight, scales, biases = rings
        return cls(weight=weight, scales=scales, biases=biases, bits=bits, group_size=group_size, tiling=tiling)

    @property
    def max_size(self) -> int:
        """Positions kept."""
        return self.weight.max_size

    @property
    def keep(self) -> int:
        """Of these, the first ones of the sequence that are never overwritten."""
        return self.weight.keep

    @property
    def offset(self) -> int:
        """Tokens ever appended."""
        return self.weight.offset

    @property
    def index(self) -> int:
        """Where the next single position is written."""
        return self.weight.index

    @property
    def kind(self) -> str:
        """Such as `rotating-quantized-w512-k0-b8-g64`."""
        return f"rotating-quantized-w{self.max_size}-k{self.keep}-b{self.bits}-g{self.group_size}"

    @property
    def keys(self) -> PackedHeads | None:
        """The packed buffer as it lies, or None while empty."""
        return self._heads(self.weight.keys, self.scales.keys, self.biases.keys)

    @property
    def values(self) -> PackedHeads | None:
        """The packed buffer as it lies, or None while empty."""
        return self._heads(self.weight.values, self.scales.values, self.biases.values)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Words, scales and biases of keys, then of values; nothing while empty."""
        heads = (self.keys, self.values)
        return tuple(part for packed in heads if packed is not None for part in _parts(packed))

    def append(
        self, keys_BKLE: mx.array, values_BKLE: mx.array
    ) -> tuple["RotatingQuantizedCache", PackedHeads, PackedHeads]:
        """Pack L positions and add them; returns the new cache and what it holds, in the ring's order.

        Numerics: scales and biases are rounded to the dtype of what is packed.
        """
        packed = (pack(heads, bits=self.bits, group_size=self.group_size) for heads in (keys_BKLE, values_BKLE))
        keys, values = (_parts(heads) for heads in packed)
        rings = (self.weight, self.scales, self.biases)
        turned = [ring.append(k, v) for ring, k, v in zip(rings, keys, values, strict=True)]
        (weight, *w), (scales, *s), (biases, *b) = turned
        new = replace(self, weight=weight, scales=scales, biases=biases)
        seen_keys, seen_values = (self._heads(*parts) for parts in zip(w, s, b, strict=True))
        if seen_keys is None or seen_values is None:
            raise AssertionError("a ring that was appended to holds nothing")
        return new, seen_keys, seen_values

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over what `append` will return."""
        return self.weight.mask(L, window=window, as_array=as_array)

    @property
    def trimmable(self) -> bool:
        """While it has not come round: a position that is overwritten is lost."""
        return self.weight.trimmable

    def trim(self, n: int) -> "RotatingQuantizedCache":
        """The cache without its last `n` tokens.

        Raises:
            RequestError: It has come round, or holds fewer.
        """
        check_trim(self, n)
        weight, scales, biases = (ring.trim(n) for ring in (self.weight, self.scales, self.biases))
        return replace(self, weight=weight, scales=scales, biases=biases)

    def _heads(self, weight: mx.array | None, scales: mx.array | None, biases: mx.array | None) -> PackedHeads | None:
        if weight is None or scales is None or biases is None:
            return None
        return PackedHeads(
            weight=weight,
            scales=scales,
            biases=biases,
            bits=self.bits,
            group_size=self.group_size,
            tiling=self.tiling,
        )


def _parts(heads: PackedHeads) -> tuple[mx.array, mx.array, mx.array]:
    return heads.weight, heads.scales, heads.biases
