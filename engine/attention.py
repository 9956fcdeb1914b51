"""Scaled dot-product attention over plain or packed keys and values, grouped heads included."""

import mlx.core as mx

from engine.cache.protocol import Heads, PackedHeads
from engine.mask import Mask, causal_matrix


def attend(
    q_BHLE: mx.array, keys: Heads, values: Heads, *, scale: float, mask: Mask, sinks_H: mx.array | None = None
) -> mx.array:
    """softmax(scale * q k^T + mask) v.

    Args:
        q_BHLE: Queries [B, H, L, E].
        keys: [B, K, T, E], or packed; H is a multiple of K and head h reads KV head h * K // H.
        values: [B, K, T, E], or packed as the keys are.
        scale: Factor on the scores.
        mask: None, `causal` (the L queries are the last of the T positions), or boolean [.., L, T], True = may attend.
        sinks_H: One logit a query head that takes part in the softmax and carries no value; plain keys only.

    Returns:
        [B, H, L, E] in q's dtype.

    Numerics: plain keys: mlx's fused operation. Packed keys: queries are scaled and rounded first; scores, masked ones set
        to the dtype's lowest finite value; softmax with float32 accumulation, rounded; then the weighted sum.
    Source: spec/cpu.md section 1, spec/kv.md section 3.
    """
    if isinstance(keys, PackedHeads) and isinstance(values, PackedHeads):
        if sinks_H is not None:
            raise TypeError("attention sinks need plain keys and values")
        return _attend_packed(q_BHLE, keys, values, scale=scale, mask=mask)
    if isinstance(keys, PackedHeads) or isinstance(values, PackedHeads):
        raise TypeError("keys and values must both be packed, or neither")
    return mx.fast.scaled_dot_product_attention(q_BHLE, keys, values, scale=scale, mask=mask, sinks=sinks_H)


def _attend_packed(q_BHLE: mx.array, keys: PackedHeads, values: PackedHeads, *, scale: float, mask: Mask) -> mx.array:
    B, H, L, E = q_BHLE.shape
    K, T = keys.weight.shape[1:3]
    scaled = (q_BHLE * scale).reshape(B, K, H // K, L, E)
    scores_BKGLT = _packed_product(scaled, keys, transpose=True)
    if mask is not None:
        allowed = causal_matrix(L, before=T - L) if isinstance(mask, str) else mask
        if allowed.ndim > 3:
            allowed = mx.expand_dims(allowed, 2)  # [B, H or 1, L, T]: an axis for the heads of a group
        scores_BKGLT = mx.where(allowed, scores_BKGLT, mx.finfo(scores_BKGLT.dtype).min)
    weights_BKGLT = mx.softmax(scores_BKGLT, axis=-1, precise=True)
    return _packed_product(weights_BKGLT, values, transpose=False).reshape(B, H, L, -1)


def _packed_product(x_BKGLN: mx.array, heads: PackedHeads, *, transpose: bool) -> mx.array:
    """x @ heads (or its transpose), every head of a group against the group's one matrix."""
    weight, scales, biases = (mx.expand_dims(a, 2) for a in (heads.weight, heads.scales, heads.biases))
    return mx.quantized_matmul(
        x_BKGLN, weight, scales, biases, transpose=transpose, group_size=heads.group_size, bits=heads.bits
    )
