"""Grouped-query attention whose output is gated by a sigmoid, head by head and element by element.

Queries and gates come from one projection, each head's query before its gate; queries and keys are normalised before they
are rotated, and only the first elements of a head rotate. The qwen3_next and qwen3_5 families share it.

Source: spec/models.md section 4.
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
class GatedAttention:
    """o(attention * sigmoid(gate)).

    Attributes:
        path: Module path in the checkpoint.
        q: [H * 2E, D]; a head's rows are its query's, then its gate's.
        k: [K * E, D].
        v: [K * E, D].
        o: [D, H * E].
        q_norm: Of a query, [E].
        k_norm: Of a key, [E].
        rope: Rotation of the first elements of a head.
        head_width: E.
    """

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    rope: Rope
    head_width: int

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
        eps: float,
        rope: Rope,
        norms_less_one: bool,
    ) -> "GatedAttention":
        """Take the four projections and the two norms from the checkpoint; `norms_less_one` is how the hub stores norms."""
        E = head_width

        def projection(name: str, inputs: int, outputs: int) -> Linear:
            return Linear.take(checkpoint, f"{path}.{name}", inputs=inputs, outputs=outputs, bias=bias)

        return cls(
            path=path,
            q=projection("q_proj", width, heads * 2 * E),
            k=projection("k_proj", width, kv_heads * E),
            v=projection("v_proj", width, kv_heads * E),
            o=projection("o_proj", heads * E, width),
            q_norm=RMSNorm.take(checkpoint, f"{path}.q_norm", width=E, eps=eps, stored_less_one=norms_less_one),
            k_norm=RMSNorm.take(checkpoint, f"{path}.k_norm", width=E, eps=eps, stored_less_one=norms_less_one),
            rope=rope,
            head_width=E,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache.

        Numerics: the sigmoid is rounded to x's dtype, then its product with the attention's output.
        """
        B, L, _ = x_BLD.shape
        E = self.head_width
        q_BLHE, gate_BLHE = mx.split(self.q(x_BLD).reshape(B, L, -1, 2 * E), 2, axis=-1)
        k_BLKE, v_BLKE = (projection(x_BLD).reshape(B, L, -1, E) for projection in (self.k, self.v))
        mask = cache.mask(L)
        q_BHLE = self.rope(self.q_norm(q_BLHE).swapaxes(1, 2), positions(cache))
        k_BKLE = self.rope(self.k_norm(k_BLKE).swapaxes(1, 2), positions(cache))
        cache, keys, values = cache.append(k_BKLE, v_BLKE.swapaxes(1, 2))
        out_BHLE = attend(q_BHLE, keys, values, scale=E**-0.5, mask=mask)
        gated_BLZ = out_BHLE.swapaxes(1, 2).reshape(B, L, -1) * mx.sigmoid(gate_BLHE.reshape(B, L, -1))
        return tap(self.path, self.o(gated_BLZ)), cache
