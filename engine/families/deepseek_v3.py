"""deepseek_v3: latent attention, and experts chosen by groups.

Pre-norm blocks. Queries go through a narrow layer, keys and values through the latent; a part of each key and query is
rotated in neighbouring pairs. The first layers are dense, the others route each token to a few experts beside shared ones.
The layers that predict further tokens are not computed: the oracle has none.

Source: spec/models.md section 7; DeepSeek-AI 2024 (DeepSeek-V3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.block_float8 import unpack_tiles
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.rotating import RotatingCache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed
from engine.latent_attention import (
    LatentHeads,
    LatentSizes,
    LowRankQueries,
    as_latents_or_ring,
    check_latent_sizes,
    latent_scale,
    mask_of,
)
from engine.latent_layout import further_layers
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.router import Choice, RoutedMLP
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "auto_map": "code of another library",
    "aux_loss_alpha": "used in training",
    "ep_size": "how experts were spread over machines",
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "num_key_value_heads": "latent attention has no heads of keys and values",
    "seq_aux": "used in training",
}
DROPPED: Final[Mapping[str, str]] = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "computed from rope_theta",
}


Latents = PlainCache | RotatingCache  # latents as keys, the shared parts of the keys as values


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a deepseek_v3; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    num_nextn_predict_layers: int = 1

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, or widths or experts that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_latent_sizes(**{key: getattr(config, key) for key in ("moe_layer_freq", "num_attention_heads", *widths)})
        if any(config.has_experts(layer) for layer in range(config.num_hidden_layers)):
            keys = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
            config.choice.check({key: getattr(config, key) for key in keys})
        return config

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts rather than one dense feed-forward."""
        due = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return due and self.n_routed_experts is not None

    @property
    def sizes(self) -> LatentSizes:
        """Sizes of an attention layer."""
        return LatentSizes(
            width=self.hidden_size,
            heads=self.num_attention_heads,
            rank=self.kv_lora_rank,
            own=self.qk_nope_head_dim,
            shared=self.qk_rope_head_dim,
            value=self.v_head_dim,
            bias=self.attention_bias,
        )

    @property
    def choice(self) -> Choice:
        """Numbers of the router."""
        return Choice(
            experts=self.n_routed_experts or 0,
            chosen=self.num_experts_per_tok,
            groups=self.n_group,
            kept=self.topk_group,
            normalised=self.norm_topk_prob,
            factor=self.routed_scaling_factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Latent self-attention with a rotated part."""

    path: str
    queries: Linear | LowRankQueries
    heads: LatentHeads
    rope: Rope
    scale: float
    own: int

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Attention":
        """Take projections and norms from the checkpoint."""
        sizes = config.sizes
        return cls(
            path=path,
            queries=Linear.take(checkpoint, f"{path}.q_proj", inputs=sizes.width, outputs=sizes.heads * sizes.key)
            if config.q_lora_rank is None
            else LowRankQueries.take(checkpoint, path, sizes, rank=config.q_lora_rank),
            heads=LatentHeads.take(checkpoint, path, sizes),
            rope=rope,
            scale=latent_scale(sizes.key, config.rope_scaling),
            own=sizes.own,
        )

    def __call__(self, x_BLD: mx.array, cache: Latents) -> tuple[mx.array, Latents]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        q_BHLE = self.queries(x_BLD).reshape(B, L, -1, self.own + self.rope.width).swapaxes(1, 2)
        own_BHLN, shared_BHLR = mx.split(q_BHLE, [self.own], axis=-1)
        latents_B1LC, keys_B1LR = self.heads.compress(x_BLD)
        allowed = mask_of(cache, L)
        rotated_BHLR, keys_B1LR = (self.rope(part, cache.offset) for part in (shared_BHLR, keys_B1LR))
        cache, latents_B1TC, keys_B1TR = cache.append(latents_B1LC, keys_B1LR)
        out_BLD = self.heads.attend(own_BHLN, rotated_BHLR, latents_B1TC, keys_B1TR, scale=self.scale, allowed=allowed)
        return tap(self.path, out_BLD), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: GatedMLP | RoutedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        path, D, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, rope),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=RoutedMLP.take(
                checkpoint,
                f"{path}.mlp",
                width=D,
                inner=config.moe_intermediate_size,
                shared_inner=config.moe_intermediate_size * (config.n_shared_experts or 0),
                choice=config.choice,
            )
            if config.has_experts(layer)
            else GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
        )

    def __call__(self, x_BLD: mx.array, cache: Latents) -> tuple[mx.array, Latents]:
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
        unpack_tiles(checkpoint)
        D, V, N = config.hidden_size, config.vocab_size, config.num_hidden_layers
        rope = make_rope(config.qk_rope_head_dim, base=config.rope_theta, traditional=True, scaling=config.rope_scaling)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(Block.take(checkpoint, i, config, rope) for i in range(N)),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps),
            head=Linear.take(checkpoint, "lm_head", inputs=D, outputs=V),
        )
        checkpoint.finish(dropped={**DROPPED, **further_layers(N, config.num_nextn_predict_layers)})
        return model

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: ids are below it."""
        return self.config.vocab_size

    @property
    def head_width(self) -> int:
        """Elements of a latent, which is what stands in a cache in the place of keys."""
        return self.config.kv_lora_rank

    @property
    def no_packed_kv(self) -> str | None:
        """Latents stay as computed."""
        return "latents are multiplied outside attention too, where packed ones have no product"

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        return tuple(PlainCache() for _ in self.blocks)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, as_latents_or_ring(cache))
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.head(hidden_BLD)
