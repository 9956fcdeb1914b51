"""TurboQuant in its key-value-width form: coded keys and values of widths of their own, for layers of ordinary attention.

Two variants that are two computations: eager decodes both when a query comes; deferred leaves values rotated, attends to them
so and turns the output back once a query. Born empty (`engine.turboquant.caches`): every position is coded as it is appended.

Source: spec/kv.md section 6.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import Heads, check_trim, growing_mask, grown
from engine.mask import Mask
from engine.turboquant import affine_keys, rotated_values
from engine.turboquant.affine_keys import CodedKeys
from engine.turboquant.rotated_values import CodedValues, unrotate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RotatedAttention:
    """Keys beside values that are still rotated.

    Attributes:
        keys_BKTE: Decoded keys.
    """

    keys_BKTE: mx.array

    def attend(self, q_BHLE: mx.array, values: Heads, *, scale: float, mask: Mask) -> mx.array:
        """Attention over rotated values, turned back.

        Numerics: mlx's fused operation in the queries' dtype, then float32, rounded to the queries' dtype.
        """
        if not isinstance(values, mx.array):
            raise TypeError("rotated attention needs rotated values")
        out_BHLE = mx.fast.scaled_dot_product_attention(q_BHLE, self.keys_BKTE, values, scale=scale, mask=mask)
        return unrotate(out_BHLE).astype(q_BHLE.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurboQuantCache:
    """Coded keys and values.

    Attributes:
        key_bits: Width of a key's code.
        value_bits: Width of a value's code.
        deferred: Values are turned back after attention.
        keys: Buffers of capacity T, or None while empty.
        values: Buffers of capacity T, or None while empty.
        offset: Positions in use.
    """

    key_bits: int
    value_bits: int
    deferred: bool = False
    keys: CodedKeys | None = None
    values: CodedValues | None = None
    offset: int = 0

    @property
    def kind(self) -> str:
        """Such as `turboquant-k8-v3` or `turboquant-k8-v3-deferred`."""
        return f"turboquant-k{self.key_bits}-v{self.value_bits}" + ("-deferred" if self.deferred else "")

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Codes, scales and zeros of keys, codes and scales of values; nothing while empty."""
        if self.keys is None or self.values is None:
            return ()
        return (self.keys.codes, self.keys.scales, self.keys.zeros, self.values.codes, self.values.scales)

    def append(self, keys_BKLE: mx.array, values_BKLE: mx.array) -> tuple["TurboQuantCache", Heads, Heads]:
        """Code L positions and add them; returns the new cache and all T positions so far, decoded.

        Numerics: decoded keys, and eager values, are rounded to bfloat16 before they are cast to the dtype of what was
            appended; deferred values are not.
        """
        dtype, end = keys_BKLE.dtype, self.offset + keys_BKLE.shape[2]
        new_keys = affine_keys.encode(keys_BKLE, self.key_bits)
        new_values = rotated_values.encode(values_BKLE, self.value_bits)
        old_keys, old_values = self.keys, self.values
        keys = CodedKeys(
            codes=grown(None if old_keys is None else old_keys.codes, self.offset, new_keys.codes),
            scales=grown(None if old_keys is None else old_keys.scales, self.offset, new_keys.scales),
            zeros=grown(None if old_keys is None else old_keys.zeros, self.offset, new_keys.zeros),
        )
        values = CodedValues(
            codes=grown(None if old_values is None else old_values.codes, self.offset, new_values.codes),
            scales=grown(None if old_values is None else old_values.scales, self.offset, new_values.scales),
        )
        longer = replace(self, keys=keys, values=values, offset=end)
        live_keys = CodedKeys(
            codes=keys.codes[:, :, :end], scales=keys.scales[:, :, :end], zeros=keys.zeros[:, :, :end]
        )
        live_values = CodedValues(codes=values.codes[:, :, :end], scales=values.scales[:, :, :end])
        seen_BKTE = affine_keys.decode(live_keys, self.key_bits).astype(dtype)
        if self.deferred:
            rotated_BKTE = rotated_values.decode_rotated(live_values, self.value_bits).astype(dtype)
            return longer, RotatedAttention(keys_BKTE=seen_BKTE), rotated_BKTE
        return longer, seen_BKTE, rotated_values.decode(live_values, self.value_bits).astype(dtype)

    def mask(self, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of L new positions over all so far."""
        return growing_mask(L, offset=self.offset, window=window, as_array=as_array)

    @property
    def trimmable(self) -> bool:
        """Always: a position is coded by itself."""
        return True

    def trim(self, n: int) -> "TurboQuantCache":
        """The cache without its last `n` tokens.

        Raises:
            RequestError: It holds fewer.
        """
        check_trim(self, n)
        return replace(self, offset=self.offset - n)


def bytes_per_token(head_width: int, *, key_bits: int, value_bits: int) -> int:
    """Bytes of one position of one head: codes of both, a scale and a zero a group of keys, a scale a group of values."""
    groups = head_width // affine_keys.GROUP
    return head_width * key_bits // 8 + 2 * groups * 2 + head_width * value_bits // 8 + groups * 2
