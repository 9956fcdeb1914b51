"""gpt_oss: experts in every layer, attention with sinks, layers with a window in turns with full ones.

A sink is a logit a head that takes its share of the softmax and carries no value. All projections, the router and the
experts have biases; the experts' activation is clipped; the head is never tied to the embedding. The hub has the experts as
mxfp4 blocks with gate and up in alternating rows; both that layout and the stacked one are read.

Source: OpenAI 2025 (gpt-oss model card); spec/models.md section 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import clipped_swiglu
from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv, positions
from engine.cache.rotating import RotatingCache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_experts, check_fixed, check_heads, check_layer_types
from engine.expert_blocks import has_blocks, take_blocks
from engine.linear import Embedding, Linear
from engine.moe import GatedExperts, weighted_sum
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

KINDS: Final = ("sliding_attention", "full_attention")  # in turns where layer_types is absent
FIXED: Final[Mapping[str, object]] = {
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "experts_per_token": "another name of num_experts_per_tok",
    "initial_context_length": "rope_scaling holds it as original_max_position_embeddings",
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "output_router_logits": "asks for another output in training",
    "router_aux_loss_coef": "used in training",
}
DROPPED: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a gpt_oss; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int
    vocab_size: int
    rope_scaling: Mapping[str, Any] | None = None
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, heads, experts or layers that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, {**FIXED, "experts_per_token": config.num_experts_per_tok})
        check_heads(heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_width=config.head_dim)
        check_experts(experts=config.num_local_experts, chosen=config.num_experts_per_tok)
        check_layer_types(raw, config.kinds, layers=config.num_hidden_layers, window=config.sliding_window)
        return config

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each layer sees."""
        return KINDS * (self.num_hidden_layers // 2) if self.layer_types is None else self.layer_types

    def window(self, layer: int) -> int | None:
        """Positions that a layer sees; None for all."""
        return self.sliding_window if self.kinds[layer] == "sliding_attention" else None

    @property
    def scaling(self) -> Mapping[str, Any] | None:
        """`rope_scaling` without `truncate`: the oracle rounds yarn's two bounds to whole pairs whatever it says."""
        return self.rope_scaling and {key: value for key, value in self.rope_scaling.items() if key != "truncate"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Grouped-query self-attention with a sink a head."""

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    sinks_H: mx.array
    rope: Rope
    head_width: int
    window: int | None

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope, window: int | None) -> "Attention":
        """Take projections and sinks from the checkpoint."""
        D, E, H = config.hidden_size, config.head_dim, config.num_attention_heads
        kv_width = config.num_key_value_heads * E
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.q_proj", inputs=D, outputs=H * E, bias=True),
            k=Linear.take(checkpoint, f"{path}.k_proj", inputs=D, outputs=kv_width, bias=True),
            v=Linear.take(checkpoint, f"{path}.v_proj", inputs=D, outputs=kv_width, bias=True),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=H * E, outputs=D, bias=True),
            sinks_H=checkpoint.take(f"{path}.sinks", (H,)),
            rope=rope,
            head_width=E,
            window=window,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        q_BHLE, k_BKLE, v_BKLE = (
            projection(x_BLD).reshape(B, L, -1, self.head_width).swapaxes(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mask = cache.mask(L, window=self.window)
        q_BHLE = self.rope(q_BHLE, positions(cache))
        k_BKLE = self.rope(k_BKLE, positions(cache))
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        scale = 1 / math.sqrt(self.head_width)
        out_BHLE = attend(q_BHLE, keys, values, scale=scale, mask=mask, sinks_H=self.sinks_H)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertMLP:
    """The weighted sum of the experts with the highest scores.

    Attributes:
        path: Module path in the checkpoint.
        router: [X, D], with a bias.
        experts: The experts.
        chosen: Experts a token.
    """

    path: str
    router: Linear
    experts: GatedExperts
    chosen: int

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config) -> "ExpertMLP":
        """Take router and experts, stacked or in the hub's blocks, from the checkpoint."""
        D, X, F = config.hidden_size, config.num_local_experts, config.intermediate_size
        experts = f"{path}.experts"
        return cls(
            path=path,
            router=Linear.take(checkpoint, f"{path}.router", inputs=D, outputs=X, bias=True),
            experts=take_blocks(checkpoint, experts, experts=X, width=D, inner=F, activation=clipped_swiglu)
            if has_blocks(checkpoint, experts)
            else GatedExperts.take(
                checkpoint, experts, experts=X, width=D, inner=F, activation=clipped_swiglu, bias=True
            ),
            chosen=config.num_experts_per_tok,
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype.

        Numerics: the chosen keep the order that the partition leaves them in, which is the order of the sum; softmax over
            the chosen with float32 accumulation, rounded.
        """
        scores_BLX = self.router(x_BLD)
        experts_BLk = mx.argpartition(scores_BLX, kth=-self.chosen, axis=-1)[..., -self.chosen :]
        weights_BLk = mx.softmax(mx.take_along_axis(scores_BLX, experts_BLk, axis=-1), axis=-1, precise=True)
        return tap(self.path, weighted_sum(self.experts(x_BLD, experts_BLk), weights_BLk))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + experts(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: ExpertMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        path, D, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, rope, config.window(layer)),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=ExpertMLP.take(checkpoint, f"{path}.mlp", config),
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer."""
        attended, cache = self.attention(self.input_norm(x_BLD), cache)
        h_BLD = x_BLD + attended
        return tap(self.path, h_BLD + self.mlp(self.post_norm(h_BLD))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, blocks, final norm, head."""

    config: Config
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear

    @classmethod
    def build(cls, raw: Mapping[str, Any], checkpoint: Checkpoint) -> "Model":
        """Build from config.json and its checkpoint, using every tensor once.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        config = Config.read(raw)
        D, V = config.hidden_size, config.vocab_size
        rope = make_rope(config.head_dim, base=config.rope_theta, scaling=config.scaling)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(Block.take(checkpoint, i, config, rope) for i in range(config.num_hidden_layers)),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps),
            head=Linear.take(checkpoint, "lm_head", inputs=D, outputs=V),
        )
        checkpoint.finish(dropped=DROPPED)
        return model

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: ids are below it."""
        return self.config.vocab_size

    @property
    def head_width(self) -> int:
        """Elements of a key or value head."""
        return self.config.head_dim

    @property
    def no_packed_kv(self) -> str | None:
        """Keys and values may be packed; sinks take part in the softmax over packed keys too."""
        return None

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        windows = (block.attention.window for block in self.blocks)
        return tuple(PlainCache() if window is None else RotatingCache(max_size=window) for window in windows)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, as_kv(cache))
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.head(hidden_BLD)
