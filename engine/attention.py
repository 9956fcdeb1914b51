"""Scaled dot-product attention over plain or packed keys and values, grouped heads included."""

import mlx.core as mx

from engine.cache.protocol import Heads, PackedHeads
from engine.errors import RequestError
from engine.mask import Mask
from engine.packed_attention import attend_packed
from engine.tiled_attention import attend_tiled


def attend(
    q_BHLE: mx.array, keys: Heads, values: Heads, *, scale: float, mask: Mask, sinks_H: mx.array | None = None
) -> mx.array:
    """softmax(scale * q k^T + mask) v.

    Args:
        q_BHLE: Queries [B, H, L, E].
        keys: [B, K, T, E], packed, or coded with their own attention; H is a multiple of K and head h reads KV head h * K // H.
        values: [B, K, T, E], or packed as the keys are.
        scale: Factor on the scores.
        mask: None, `causal` (the L queries are the last of the T positions), or boolean [.., L, T], True = may attend.
        sinks_H: One logit a query head that takes part in the softmax and carries no value.

    Returns:
        [B, H, L, E] in q's dtype.

    Raises:
        RequestError: Packed keys are to be gone through in tiles, and the attention has sinks or a dtype that is not tiled.

    Numerics: plain keys: mlx's fused operation. Packed keys: `engine.packed_attention`, or where they say so
        `engine.tiled_attention`.
    Source: spec/cpu.md section 1, spec/kv.md section 3.
    """
    if isinstance(keys, PackedHeads) and isinstance(values, PackedHeads):
        if keys.tiling is None:
            return attend_packed(q_BHLE, keys, values, scale=scale, mask=mask, sinks_H=sinks_H)
        if sinks_H is not None:
            raise RequestError(
                "attention with sinks is not tiled",
                reason="the oracle gives it up for attention over all positions at once, without a word",
                next_step="use the same KV mode without tiles",
            )
        return attend_tiled(q_BHLE, keys, values, scale=scale, mask=mask, tiling=keys.tiling)
    if isinstance(keys, PackedHeads) or isinstance(values, PackedHeads):
        raise TypeError("keys and values must both be packed, or neither")
    if not isinstance(keys, mx.array):  # asked this way, because asking for a protocol takes as long as a small product
        if sinks_H is not None:
            raise TypeError("attention sinks need plain or packed keys and values")
        return keys.attend(q_BHLE, values, scale=scale, mask=mask)
    if not isinstance(values, mx.array):
        raise TypeError("values are coded beside keys that are not")
    return mx.fast.scaled_dot_product_attention(q_BHLE, keys, values, scale=scale, mask=mask, sinks=sinks_H)
