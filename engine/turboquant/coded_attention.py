"""Attention over vectors in mlx-vlm's form.

Several queries at once attend to decoded keys and values. A single query is rotated instead of the keys, scored against their
codes, and the weighted sum of rotated values is turned back once: the orders of both sums are the oracle's.

Guarantees: bit-identical to mlx-vlm 0.6.3 on mlx's CPU backend, where none of its Metal kernels runs.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.cache.protocol import Heads
from engine.mask import Mask
from engine.turboquant.unit_codec import CodedVectors, UnitCodec

LEAST_SUM: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitHeads:
    """Keys or values of all heads with the codec that reads them.

    Attributes:
        codec: Of these vectors.
        vectors: All positions that a query may attend to.
    """

    codec: UnitCodec
    vectors: CodedVectors

    def attend(self, q_BHLE: mx.array, values: Heads, *, scale: float, mask: Mask) -> mx.array:
        """softmax(scale * q k^T + mask) v, with these as keys.

        Args:
            q_BHLE: Queries [B, H, L, E].
            values: Coded as the keys are.
            scale: Factor on the queries.
            mask: None, `causal`, or boolean [.., L, T].

        Returns:
            [B, H, L, E] in q's dtype.

        Numerics: several queries: decoded vectors are rounded to q's dtype, then mlx's fused operation. One query: float32
            after the scaled query was rounded to its dtype; the output is rounded once.
        """
        if not isinstance(values, UnitHeads):
            raise TypeError("keys and values must both be coded, or neither")
        if q_BHLE.shape[2] > 1:
            keys, seen = (heads.codec.decode(heads.vectors).astype(q_BHLE.dtype) for heads in (self, values))
            return mx.fast.scaled_dot_product_attention(q_BHLE, keys, seen, scale=scale, mask=mask)
        return _one_query(q_BHLE, self, values, scale=scale, mask=mask)


def _one_query(q_BHLE: mx.array, keys: UnitHeads, values: UnitHeads, *, scale: float, mask: Mask) -> mx.array:
    B, H, L, E = q_BHLE.shape
    K = keys.vectors.codes.shape[1]
    rotated_q = keys.codec.rotate((q_BHLE * scale).reshape(B, K, H // K, L, E))
    dots_BKGLT = mx.einsum("bkgle,bkte->bkglt", rotated_q, keys.codec.rotated_units(keys.vectors))
    scores_BKGLT = dots_BKGLT * _norms(keys)[:, :, None, None, :]
    if mask is None or isinstance(mask, str):
        out = _weighted(mx.softmax(scores_BKGLT, axis=-1), values)
    else:
        allowed = mx.expand_dims(mask, 2) if mask.ndim == scores_BKGLT.ndim - 1 else mask
        scores_BKGLT = mx.where(allowed, scores_BKGLT, mx.finfo(scores_BKGLT.dtype).min)
        weights_BKGLT = mx.exp(scores_BKGLT - mx.max(scores_BKGLT, axis=-1)[..., None])
        out = _weighted(weights_BKGLT, values) / mx.maximum(mx.sum(weights_BKGLT, axis=-1)[..., None], LEAST_SUM)
    return out.reshape(B, H, L, -1).astype(q_BHLE.dtype)


def _weighted(weights_BKGLT: mx.array, values: UnitHeads) -> mx.array:
    units = values.codec.rotated_units(values.vectors)
    summed = mx.einsum("bkglt,bkt,bkte->bkgle", weights_BKGLT, _norms(values), units)
    return values.codec.unrotate(summed)


def _norms(heads: UnitHeads) -> mx.array:
    return heads.vectors.norms.squeeze(-1).astype(mx.float32)
