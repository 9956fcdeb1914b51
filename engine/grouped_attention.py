"""Grouped-query attention as most dense and hybrid families have it: four projections around the attention.

What may be there or not: a rotation, a window, a norm of each head's query and key. Norms over all heads at once, sinks and
gates are not here.

Source: Ainslie et al. 2023; spec/models.md section 1.
"""

from dataclasses import dataclass

import mlx.core as mx

from engine.attention import attend
from engine.cache.protocol import KVCache, positions
from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.norm import RMSNorm
from engine.rope import Rope
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedAttention:
    """Self-attention to the positions so far.

    Attributes:
        path: Module path in the checkpoint.
        q: [H * E, D].
        k: [K * E, D].
        v: [K * E, D].
        o: [D, H * E].
        head_width: E.
        scale: Factor on the scores.
        rope: Rotation of queries and keys; None: positions are known by the mask alone.
        window: Positions that a query sees, itself included; None for all.
        q_norm: Of a head's query, before it rotates, [E]; None for none.
        k_norm: Of a head's key, before it rotates, [E]; None for none.
    """

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    head_width: int
    scale: float
    rope: Rope | None
    window: int | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

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
        window: int | None = None,
        out_bias: bool | None = None,
        norm_eps: float | None = None,
    ) -> "GroupedAttention":
        """Take `q_proj`, `k_proj`, `v_proj` and `o_proj`, and `q_norm` and `k_norm` where there are norms, from the checkpoint.

        Args:
            checkpoint: Where from.
            path: Module path.
            width: D.
            heads: H.
            kv_heads: K.
            head_width: E.
            bias: Whether the projections have biases.
            scale: Factor on the scores.
            rope: Rotation of queries and keys, or None.
            window: Positions that a query sees; None for all.
            out_bias: Whether `o_proj` has one, where that differs from `bias`.
            norm_eps: Of the norms of queries and keys; None where there are none.
        """

        def projection(name: str, outputs: int) -> Linear:
            return Linear.take(checkpoint, f"{path}.{name}", inputs=width, outputs=outputs, bias=bias)

        def norm(name: str) -> RMSNorm | None:
            if norm_eps is None:
                return None
            return RMSNorm.take(checkpoint, f"{path}.{name}", width=head_width, eps=norm_eps)

        return cls(
            path=path,
            q=projection("q_proj", heads * head_width),
            k=projection("k_proj", kv_heads * head_width),
            v=projection("v_proj", kv_heads * head_width),
            o=Linear.take(
                checkpoint,
                f"{path}.o_proj",
                inputs=heads * head_width,
                outputs=width,
                bias=bias if out_bias is None else out_bias,
            ),
            head_width=head_width,
            scale=scale,
            rope=rope,
            window=window,
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        q_BLHE, k_BLKE, v_BLKE = (
            projection(x_BLD).reshape(B, L, -1, self.head_width) for projection in (self.q, self.k, self.v)
        )
        if self.q_norm is not None:
            q_BLHE = self.q_norm(q_BLHE)
        if self.k_norm is not None:
            k_BLKE = self.k_norm(k_BLKE)
        q_BHLE, k_BKLE, v_BKLE = (heads.swapaxes(1, 2) for heads in (q_BLHE, k_BLKE, v_BLKE))
        if self.rope is not None:
            q_BHLE, k_BKLE = self.rope(q_BHLE, positions(cache)), self.rope(k_BKLE, positions(cache))
        mask = cache.mask(L, window=self.window)
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        out_BHLE = attend(q_BHLE, keys, values, scale=self.scale, mask=mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache
