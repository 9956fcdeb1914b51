"""Grouped-query attention as the hybrid families have it between other layers: four projections, a rotation or none.

Holds what those families share; windows, norms of queries and keys, and gates are not here.
"""

from dataclasses import dataclass

import mlx.core as mx

from engine.attention import attend
from engine.cache.protocol import KVCache
from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.rope import Rope
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedAttention:
    """Self-attention to all positions so far.

    Attributes:
        path: Module path in the checkpoint.
        q: [H * E, D].
        k: [K * E, D].
        v: [K * E, D].
        o: [D, H * E].
        head_width: E.
        scale: Factor on the scores.
        rope: Rotation of queries and keys; None: positions are known by the mask alone.
    """

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    head_width: int
    scale: float
    rope: Rope | None

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        bias: bool,
        scale: float,
        rope: Rope | None,
    ) -> "GroupedAttention":
        """Take `q_proj`, `k_proj`, `v_proj` and `o_proj` from the checkpoint."""

        def projection(name: str, inputs: int, outputs: int) -> Linear:
            return Linear.take(checkpoint, f"{path}.{name}", inputs=inputs, outputs=outputs, bias=bias)

        return cls(
            path=path,
            q=projection("q_proj", width, heads * head_width),
            k=projection("k_proj", width, kv_heads * head_width),
            v=projection("v_proj", width, kv_heads * head_width),
            o=projection("o_proj", heads * head_width, width),
            head_width=head_width,
            scale=scale,
            rope=rope,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        q_BHLE, k_BKLE, v_BKLE = (
            projection(x_BLD).reshape(B, L, -1, self.head_width).swapaxes(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        if self.rope is not None:
            q_BHLE, k_BKLE = self.rope(q_BHLE, cache.offset), self.rope(k_BKLE, cache.offset)
        mask = cache.mask(L)
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        out_BHLE = attend(q_BHLE, keys, values, scale=self.scale, mask=mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache
