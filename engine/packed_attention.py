"""Attention over packed keys and values, all positions at once, with or without sinks.

A group of query heads is multiplied with the one packed matrix of its KV head; nothing is ever unpacked in memory.
"""

import mlx.core as mx

from engine.cache.protocol import PackedHeads
from engine.mask import Mask, causal_matrix


def attend_packed(
    q_BHLE: mx.array,
    keys: PackedHeads,
    values: PackedHeads,
    *,
    scale: float,
    mask: Mask,
    sinks_H: mx.array | None = None,
) -> mx.array:
    """softmax(scale * q k^T + mask) v over packed keys and values.

    Args:
        q_BHLE: Queries [B, H, L, E].
        keys: Of K heads and T positions; H is a multiple of K and head h reads KV head h * K // H.
        values: Likewise.
        scale: Factor on the scores.
        mask: None, `causal` (the L queries are the last of the T positions), or boolean [.., L, T], True = may attend.
        sinks_H: One logit a query head that takes part in the softmax and carries no value.

    Returns:
        [B, H, L, E] in q's dtype.

    Numerics: queries are scaled and rounded first; scores, masked ones set to the dtype's lowest finite value; softmax with
        float32 accumulation, rounded; then the weighted sum. With sinks the softmax is written out in float32, and rounded
        once to q's dtype.
    Source: spec/kv.md section 3.
    """
    B, H, L, _ = q_BHLE.shape
    K, T = keys.weight.shape[1:3]
    scores_BKGLT = packed_product(grouped(q_BHLE * scale, K), keys, transpose=True)
    if mask is not None:
        allowed = causal_matrix(L, before=T - L) if isinstance(mask, str) else mask
        if allowed.ndim > 3:
            allowed = mx.expand_dims(allowed, 2)  # [B, H or 1, L, T]: an axis for the heads of a group
        scores_BKGLT = mx.where(allowed, scores_BKGLT, mx.finfo(scores_BKGLT.dtype).min)
    if sinks_H is None:
        weights_BKGLT = mx.softmax(scores_BKGLT, axis=-1, precise=True)
    else:
        sinks_KG11 = sinks_H.astype(mx.float32).reshape(K, H // K, 1, 1)
        weights_BKGLT = _softmax_with_sinks(scores_BKGLT.astype(mx.float32), sinks_KG11).astype(q_BHLE.dtype)
    return packed_product(weights_BKGLT, values, transpose=False).reshape(B, H, L, -1)


def grouped(q_BHLE: mx.array, K: int) -> mx.array:
    """Queries [B, K, G, L, E], the heads of a group side by side."""
    B, H, L, E = q_BHLE.shape
    return q_BHLE.reshape(B, K, H // K, L, E)


def packed_product(x_BKGLN: mx.array, heads: PackedHeads, *, transpose: bool) -> mx.array:
    """x @ heads (or its transpose), every head of a group against the group's one matrix."""
    weight, scales, biases = (mx.expand_dims(a, 2) for a in (heads.weight, heads.scales, heads.biases))
    return mx.quantized_matmul(
        x_BKGLN, weight, scales, biases, transpose=transpose, group_size=heads.group_size, bits=heads.bits
    )


def _softmax_with_sinks(scores_BKGLT: mx.array, sinks_KG11: mx.array) -> mx.array:
    peak = mx.maximum(mx.max(scores_BKGLT, axis=-1, keepdims=True), sinks_KG11)
    weights_BKGLT = mx.exp(scores_BKGLT - peak)
    return weights_BKGLT / (mx.sum(weights_BKGLT, axis=-1, keepdims=True) + mx.exp(sinks_KG11 - peak))
