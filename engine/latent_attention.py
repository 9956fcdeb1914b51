"""Latent attention: keys and values of all heads are kept as one short vector a position, the latent.

The latent is cached beside a rotated part of the key that all heads share. A score is the sum of a product against the rest
of the key and a product against the rotated part. A single query is moved into the latent space and attends there
(absorbed); several queries attend to keys and values computed back from the latents (reconstructed). The two are equal on
paper, not in bits. How queries arise, what is cached and which positions are seen is the family's business.

Source: spec/models.md section 7; DeepSeek-AI 2024 (DeepSeek-V2).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.rotating import RotatingCache
from engine.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.latent_layout import split_joint_projection
from engine.linear import Linear, Packed, take_matrix
from engine.mask import causal_matrix
from engine.norm import RMSNorm
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of a latent attention layer.

    Attributes:
        width: D.
        heads: H.
        rank: C, elements of a latent.
        own: N, elements of a key that are a head's own.
        shared: R, elements of a key that all heads share.
        value: E, elements of a value.
        eps: Of the norms; the DeepSeek families have this one whatever their config says for the other norms.
        bias: Whether the projections from and to the layer's width have one.
    """

    width: int
    heads: int
    rank: int
    own: int
    shared: int
    value: int
    eps: float = 1e-6
    bias: bool = False

    @property
    def key(self) -> int:
        """Elements of a query or key: N + R."""
        return self.own + self.shared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadLinear:
    """A linear layer of its own for every head.

    Attributes:
        path: Module path in the checkpoint.
        weight: Dense [H, out, in], or packed.
    """

    path: str
    weight: mx.array | Packed

    @property
    def outputs(self) -> int:
        """Elements that come out of a head."""
        weight = self.weight.weight if isinstance(self.weight, Packed) else self.weight
        return weight.shape[1]

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, heads: int, inputs: int, outputs: int) -> "HeadLinear":
        """Take the stacked matrices from the checkpoint."""
        return cls(path=path, weight=take_matrix(checkpoint, path, rows=(heads, outputs), columns=inputs))

    def __call__(self, x: mx.array) -> mx.array:
        """x W^T of every head: [B, H or 1, L, in] to [B, H, L, out]."""
        weight = self.weight
        return tap(self.path, weight.product(x) if isinstance(weight, Packed) else x @ weight.swapaxes(-1, -2))

    def back(self, x: mx.array) -> mx.array:
        """x W of every head: [B, H or 1, L, out] to [B, H, L, in].

        Numerics: packed weights are multiplied untransposed, which is another kernel than `__call__`'s.
        """
        weight = self.weight
        if isinstance(weight, Packed):
            form = weight.format
            y = mx.quantized_matmul(
                x,
                weight.weight,
                weight.scales,
                weight.biases,
                transpose=False,
                group_size=form.group_size,
                bits=form.bits,
                mode=form.mode,
            )
        else:
            y = x @ weight
        return tap(self.path, y)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRankQueries:
    """Queries through a narrow normalised layer: b(norm(a(x))).

    Attributes:
        a: [R, D].
        norm: Over R elements.
        b: [H * E, R].
    """

    a: Linear
    norm: RMSNorm
    b: Linear

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, sizes: LatentSizes, *, rank: int) -> "LowRankQueries":
        """Take `q_a_proj`, `q_a_layernorm` and `q_b_proj` from the checkpoint, `rank` wide between them."""
        D, outputs = sizes.width, sizes.heads * sizes.key
        return cls(
            a=Linear.take(checkpoint, f"{path}.q_a_proj", inputs=D, outputs=rank, bias=sizes.bias),
            norm=RMSNorm.take(checkpoint, f"{path}.q_a_layernorm", width=rank, eps=sizes.eps),
            b=Linear.take(checkpoint, f"{path}.q_b_proj", inputs=rank, outputs=outputs),
        )

    def narrow(self, x_BLD: mx.array) -> mx.array:
        """The normalised narrow layer [B, L, R]."""
        return self.norm(self.a(x_BLD))

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """All heads' queries [B, L, H * E]."""
        return self.b(self.narrow(x_BLD))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentHeads:
    """Keys and values through a latent.

    Attributes:
        down: To the latent and the shared part of the key [C + R, D].
        norm: Of the latent, over C elements.
        key: From the N elements of a query's own part to the latent, [H, C, N].
        value: From the latent to a head's value, [H, E, C].
        out: From all heads' outputs to the layer's, [D, H * E].
    """

    down: Linear
    norm: RMSNorm
    key: HeadLinear
    value: HeadLinear
    out: Linear

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, sizes: LatentSizes) -> "LatentHeads":
        """Take `kv_a_proj_with_mqa`, `kv_a_layernorm`, `embed_q` and `unembed_out`, or the hub's `kv_b_proj`, and `o_proj`."""
        split_joint_projection(checkpoint, path, heads=sizes.heads, rank=sizes.rank, own=sizes.own, value=sizes.value)
        D, H, C = sizes.width, sizes.heads, sizes.rank
        down = f"{path}.kv_a_proj_with_mqa"
        return cls(
            down=Linear.take(checkpoint, down, inputs=D, outputs=C + sizes.shared, bias=sizes.bias),
            norm=RMSNorm.take(checkpoint, f"{path}.kv_a_layernorm", width=C, eps=sizes.eps),
            key=HeadLinear.take(checkpoint, f"{path}.embed_q", heads=H, inputs=sizes.own, outputs=C),
            value=HeadLinear.take(checkpoint, f"{path}.unembed_out", heads=H, inputs=C, outputs=sizes.value),
            out=Linear.take(checkpoint, f"{path}.o_proj", inputs=H * sizes.value, outputs=D, bias=sizes.bias),
        )

    def compress(self, x_BLD: mx.array) -> tuple[mx.array, mx.array]:
        """What is to be cached: normalised latents [B, 1, L, C] and the shared part of the keys, unrotated [B, 1, L, R]."""
        latent_BLC, shared_BLR = mx.split(self.down(x_BLD), [self.key.outputs], axis=-1)
        return mx.expand_dims(self.norm(latent_BLC), 1), mx.expand_dims(shared_BLR, 1)

    def attend(
        self,
        own_BHLN: mx.array,
        shared_BHLR: mx.array,
        latents_B1TC: mx.array,
        keys_B1TR: mx.array,
        *,
        scale: float,
        allowed: mx.array | None,
    ) -> mx.array:
        """Attend from L queries to T latents.

        Args:
            own_BHLN: The queries' parts that meet a head's own part of the key.
            shared_BHLR: The queries' parts that meet the shared part, rotated where the family rotates.
            latents_B1TC: Latents of all positions that can be seen.
            keys_B1TR: Shared parts of their keys, likewise rotated.
            scale: Factor on the scores.
            allowed: Boolean [.., L, T]; None where every query sees every position.

        Returns:
            The layer's output [B, L, D].

        Numerics: the shared part's scores are a rounded matrix of their own, masked with the dtype's lowest finite value,
            which the fused attention then adds to the other part's.
        Source: spec/models.md section 7.
        """
        B, _, L, _ = own_BHLN.shape
        scores_BHLT = (shared_BHLR * scale) @ keys_B1TR.swapaxes(-1, -2)
        if allowed is not None:
            lowest = mx.array(mx.finfo(scores_BHLT.dtype).min, scores_BHLT.dtype)
            scores_BHLT = mx.where(allowed, scores_BHLT, lowest)
        if L == 1:
            absorbed_BHLC = mx.fast.scaled_dot_product_attention(
                self.key(own_BHLN), latents_B1TC, latents_B1TC, scale=scale, mask=scores_BHLT
            )
            out_BHLE = self.value(absorbed_BHLC)
        else:
            out_BHLE = mx.fast.scaled_dot_product_attention(
                own_BHLN, self.key.back(latents_B1TC), self.value(latents_B1TC), scale=scale, mask=scores_BHLT
            )
        return self.out(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))


def as_latents(cache: Cache) -> PlainCache:
    """The same cache, known to keep latents as keys and the shared parts of the keys as values, as computed.

    Raises:
        TypeError: It does not; the family handed a layer the wrong kind.
    """
    if not isinstance(cache, PlainCache):
        raise TypeError(f"a layer of latent attention was handed a cache of kind {cache.kind}")
    return cache


def as_latents_or_ring(cache: Cache) -> PlainCache | RotatingCache:
    """As `as_latents`, where a ring will do too.

    Raises:
        TypeError: It is neither.
    """
    return cache if isinstance(cache, RotatingCache) else as_latents(cache)


def mask_of(cache: PlainCache | RotatingCache, L: int) -> mx.array | None:
    """Which of the positions that `append` will give L new ones may see, boolean; None for a single one, which sees all."""
    mask = cache.mask(L, as_array=True)
    if isinstance(mask, str):
        raise TypeError(f"a cache of kind {cache.kind} gave the word {mask} for a matrix")
    return mask


def allowed_positions(L: int, *, before: int) -> mx.array | None:
    """Which of the positions so far L new ones may see, boolean [L, before + L]; None for a single one, which sees all."""
    return None if L == 1 else causal_matrix(L, before=before)


def latent_scale(width: int, scaling: Mapping[str, Any] | None) -> float:
    """Factor on the scores of queries and keys of `width` elements: yarn's temperature, squared, over the square root.

    Source: Peng et al. 2023, section 3.4; spec/models.md section 7.
    """
    weight, factor = (scaling or {}).get("mscale_all_dim", 0), (scaling or {}).get("factor", 1)
    scale: float = width**-0.5
    if weight and factor > 1:
        temperature = 0.1 * weight * math.log(factor) + 1.0
        scale = scale * temperature * temperature
    return scale


def check_latent_sizes(**sizes: int) -> None:
    """Refuse sizes that are not positive, a turned part without pairs, or one wider than the heads of an indexer.

    Args:
        **sizes: Values by their keys in config.json, `qk_rope_head_dim` among them.

    Raises:
        ConfigError: One of them cannot be.
    """
    turned = sizes["qk_rope_head_dim"]
    if min(sizes.values()) < 1 or turned % 2 or turned > sizes.get("index_head_dim", turned):
        raise ConfigError(
            "the sizes of config.json do not fit together", next_step="mend config.json", **dict(sorted(sizes.items()))
        )
