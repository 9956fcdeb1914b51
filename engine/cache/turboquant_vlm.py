"""TurboQuant in mlx-vlm's form: keys and values alike as norms and coded unit vectors, in all but the last layer.

Half a bit is shared out: 3.5 bits are 3 for a key and 4 for a value. Born empty (`engine.turboquant.caches`): every position is
coded as it is appended.

Guarantees: codes and attention are bit-identical to mlx-vlm 0.6.3's on mlx's CPU backend.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import check_trim, growing_mask, grown
from engine.mask import Mask
from engine.turboquant.coded_attention import UnitHeads
from engine.turboquant.unit_codec import CodedVectors, UnitCodec

KEY_SEED, VALUE_SEED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurboQuantVlmCache:
    """Coded keys and values.

    Attributes:
        key_bits: Width of a key's codes.
        value_bits: Width of a value's codes.
        keys: Buffers of capacity T, or None while empty.
        values: Buffers of capacity T, or None while empty.
        offset: Positions in use.
    """

    key_bits: int
    value_bits: int
    keys: CodedVectors | None = None
    values: CodedVectors | None = None
    offset: int = 0

    @property
    def kind(self) -> str:
        """Such as `turboquant-vlm-b3` or `turboquant-vlm-b3.5`."""
        half = "" if self.key_bits == self.value_bits else ".5"
        return f"turboquant-vlm-b{self.key_bits}{half}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Norms and codes of keys, then of values; nothing while empty."""
        if self.keys is None or self.values is None:
            return ()
        return (self.keys.norms, self.keys.codes, self.values.norms, self.values.codes)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["TurboQuantVlmCache", UnitHeads, UnitHeads]:
        """Code L positions and add them; returns the new cache and all T positions so far, coded."""
        end = self.offset + keys_BKLE.shape[2]
        key_codec = UnitCodec(width=keys_BKLE.shape[-1], bits=self.key_bits, seed=KEY_SEED)
        value_codec = UnitCodec(width=values_BKLE.shape[-1], bits=self.value_bits, seed=VALUE_SEED)
        keys = _longer(self.keys, self.offset, key_codec.encode(keys_BKLE))
        values = _longer(self.values, self.offset, value_codec.encode(values_BKLE))
        seen_keys = UnitHeads(codec=key_codec, vectors=_first(keys, end))
        seen_values = UnitHeads(codec=value_codec, vectors=_first(values, end))
        return replace(self, keys=keys, values=values, offset=end), seen_keys, seen_values

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over all so far."""
        return growing_mask(L, offset=self.offset, window=window, as_array=as_array)

    @property
    def trimmable(self) -> bool:
        """Always: a position is coded by itself."""
        return True

    def trim(self, n: int) -> "TurboQuantVlmCache":
        """The cache without its last `n` tokens.

        Raises:
            RequestError: It holds fewer.
        """
        check_trim(self, n)
        return replace(self, offset=self.offset - n)


def _longer(old: CodedVectors | None, used: int, new: CodedVectors) -> CodedVectors:
    return CodedVectors(
        norms=grown(None if old is None else old.norms, used, new.norms),
        codes=grown(None if old is None else old.codes, used, new.codes),
    )


def _first(vectors: CodedVectors, end: int) -> CodedVectors:
    return CodedVectors(norms=vectors.norms[:, :, :end], codes=vectors.codes[:, :, :end])
