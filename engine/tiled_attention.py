"""Attention over packed keys and values in tiles of positions: no matrix of all scores is ever held.

A running maximum, a running sum and a running output are corrected from tile to tile, and divided once at the end. The
result is that of `engine.packed_attention` up to rounding, not bit for bit; the size of a tile changes bits too.

Like the oracle, only queries without a mask or with a causal one go through tiles, in prefill and decode alike; with a
matrix (a window) attention is over all positions at once. Unlike it, nothing else falls back: what the released gate leaves
out in silence (float32) is refused here unless the mode is lifted.

Source: spec/kv.md section 3, fused tiled variant; Dao 2023.
"""

from dataclasses import replace
from typing import Final

import mlx.core as mx

from engine.cache.protocol import PackedHeads, Tiling
from engine.errors import RequestError
from engine.mask import Mask, causal_matrix
from engine.packed_attention import attend_packed, grouped, packed_product

TILED_BITS: Final = (4, 8)
SHIPPED: Final = (mx.float16, mx.bfloat16)


def attend_tiled(
    q_BHLE: mx.array, keys: PackedHeads, values: PackedHeads, *, scale: float, mask: Mask, tiling: Tiling
) -> mx.array:
    """softmax(scale * q k^T + mask) v over packed keys and values, tile by tile.

    Args:
        q_BHLE: Queries [B, H, L, E].
        keys: Of K heads and T positions, in 4 or 8 bits.
        values: Likewise.
        scale: Factor on the scores.
        mask: None, `causal`, or a matrix, which is not tiled.
        tiling: Size of a tile, and whether float32 is admitted.

    Returns:
        [B, H, L, E] in q's dtype.

    Raises:
        RequestError: The queries are in float32 and the tiling is not lifted.

    Numerics: everything in q's dtype: scores, their exponentials (of the distance to the running maximum), sums, products and
        the correction factor are each rounded to it.
    """
    check_tiled_dtype(q_BHLE.dtype, tiling)
    if mask is not None and not isinstance(mask, str):
        return attend_packed(q_BHLE, keys, values, scale=scale, mask=mask)
    B, H, L, _ = q_BHLE.shape
    K, T = keys.weight.shape[1:3]
    q_BKGLE = grouped(q_BHLE * scale, K)
    allowed = None if mask is None else causal_matrix(L, before=T - L)
    state: tuple[mx.array, mx.array, mx.array] | None = None
    for begin in range(0, T, tiling.size):
        end = min(begin + tiling.size, T)
        scores_BKGLN = packed_product(q_BKGLE, _positions(keys, begin, end), transpose=True)
        if allowed is not None:
            scores_BKGLN = mx.where(allowed[:, begin:end], scores_BKGLN, mx.finfo(scores_BKGLN.dtype).min)
        state = _folded(state, scores_BKGLN, _positions(values, begin, end))
    if state is None:
        raise AssertionError("attention over no position")
    _, row_sum, out_BKGLE = state
    return (out_BKGLE / row_sum).reshape(B, H, L, -1)


def check_tiled_dtype(dtype: mx.Dtype, tiling: Tiling) -> None:
    """Refuse what the released oracle leaves out in silence.

    Raises:
        RequestError: Queries of this dtype are not tiled.
    """
    if dtype not in SHIPPED and not tiling.lifted:
        raise RequestError(
            "queries of this dtype are not tiled",
            dtype=str(dtype).removeprefix("mlx.core."),
            reason="the oracle as it is released tiles 16-bit floats alone, and others not, without a word",
            next_step="use bf16 or f16, or the lifted tiling",
        )


def _folded(
    state: tuple[mx.array, mx.array, mx.array] | None, scores: mx.array, values: PackedHeads
) -> tuple[mx.array, mx.array, mx.array]:
    """Running maximum, sum and output with one more tile in them."""
    peak = mx.max(scores, axis=-1, keepdims=True)
    if state is None:
        weights = mx.exp(scores - peak)
        return peak, mx.sum(weights, axis=-1, keepdims=True), packed_product(weights, values, transpose=False)
    old_peak, row_sum, out = state
    peak = mx.maximum(old_peak, peak)
    factor = mx.exp(old_peak - peak)
    weights = mx.exp(scores - peak)
    row_sum = factor * row_sum + mx.sum(weights, axis=-1, keepdims=True)
    return peak, row_sum, out * factor + packed_product(weights, values, transpose=False)


def _positions(heads: PackedHeads, begin: int, end: int) -> PackedHeads:
    weight, scales, biases = (a[:, :, begin:end] for a in (heads.weight, heads.scales, heads.biases))
    return replace(heads, weight=weight, scales=scales, biases=biases)
