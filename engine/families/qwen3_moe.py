"""qwen3_moe: qwen3's attention over layers of experts, some of which may be dense instead.

Queries and keys are normalised head by head before they rotate. A router's softmax runs over all experts, the most probable
ones are chosen after it, and their probabilities may be made to sum to one.

Source: spec/models.md section 3; Yang et al. 2025 (Qwen3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import swiglu
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_experts, check_fixed, check_heads
from engine.errors import ConfigError
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.moe import GatedExperts, weighted_sum
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "use_sliding_window": False,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "output_router_logits": "asks for another output in training",
    "router_aux_loss_coef": "used in training",
    "sliding_window": "read only together with use_sliding_window",
}
DROPPED: Final[Mapping[str, str]] = {}
TIED: Final[Mapping[str, str]] = {r"lm_head\..*": "a copy of the embedding, to which the head is tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a qwen3_moe; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    vocab_size: int

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, or heads or experts that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_width=config.head_dim)
        if config.decoder_sparse_step < 1:
            raise ConfigError(
                "decoder_sparse_step counts layers",
                decoder_sparse_step=config.decoder_sparse_step,
                next_step="mend config.json",
            )
        if any(config.has_experts(layer) for layer in range(config.num_hidden_layers)):
            check_experts(experts=config.num_experts, chosen=config.num_experts_per_tok)
        return config

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts rather than one dense feed-forward."""
        due = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return due and layer not in self.mlp_only_layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertMLP:
    """The weighted sum of a few experts, chosen by their probability.

    Attributes:
        path: Module path in the checkpoint.
        router: [X, D].
        experts: The experts.
        chosen: Experts a token.
        normalised: The chosen probabilities are divided by their sum.
    """

    path: str
    router: Linear
    experts: GatedExperts
    chosen: int
    normalised: bool

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config) -> "ExpertMLP":
        """Take router and experts, stacked or one by one, from the checkpoint."""
        D, X = config.hidden_size, config.num_experts
        return cls(
            path=path,
            router=Linear.take(checkpoint, f"{path}.gate", inputs=D, outputs=X),
            experts=GatedExperts.take(
                checkpoint,
                f"{path}.switch_mlp",
                experts=X,
                width=D,
                inner=config.moe_intermediate_size,
                activation=swiglu,
                apart=lambda expert, name: f"{path}.experts.{expert}.{name}",
            ),
            chosen=config.num_experts_per_tok,
            normalised=config.norm_topk_prob,
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype.

        Numerics: softmax over all experts with float32 accumulation, rounded; the chosen keep the order that the partition
            leaves them in, which is the order of the sum.
        """
        shares_BLX = mx.softmax(self.router(x_BLD), axis=-1, precise=True)
        experts_BLk = mx.argpartition(shares_BLX, kth=-self.chosen, axis=-1)[..., -self.chosen :]
        shares_BLk = mx.take_along_axis(shares_BLX, experts_BLk, axis=-1)
        if self.normalised:
            shares_BLk = shares_BLk / shares_BLk.sum(axis=-1, keepdims=True)
        return tap(self.path, weighted_sum(self.experts(x_BLD, experts_BLk), shares_BLk))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: GroupedAttention
    post_norm: RMSNorm
    mlp: ExpertMLP | GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        path, D, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=GroupedAttention.take(
                checkpoint,
                f"{path}.self_attn",
                width=D,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_width=config.head_dim,
                bias=False,
                scale=config.head_dim**-0.5,
                rope=rope,
                norm_eps=eps,
            ),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=ExpertMLP.take(checkpoint, f"{path}.mlp", config)
            if config.has_experts(layer)
            else GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer."""
        attended, cache = self.attention(self.input_norm(x_BLD), cache)
        h_BLD = x_BLD + attended
        return tap(self.path, h_BLD + self.mlp(self.post_norm(h_BLD))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, blocks, final norm, head (None where it is tied)."""

    config: Config
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear | None

    @classmethod
    def build(cls, raw: Mapping[str, Any], checkpoint: Checkpoint) -> "Model":
        """Build from config.json and its checkpoint, using every tensor once.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        config = Config.read(raw)
        D, V = config.hidden_size, config.vocab_size
        rope = make_rope(config.head_dim, base=config.rope_theta)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(Block.take(checkpoint, i, config, rope) for i in range(config.num_hidden_layers)),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps),
            head=None if config.tie_word_embeddings else Linear.take(checkpoint, "lm_head", inputs=D, outputs=V),
        )
        checkpoint.finish(dropped={**DROPPED, **TIED} if config.tie_word_embeddings else DROPPED)
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
        """Keys and values may be packed."""
        return None

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        return tuple(PlainCache() for _ in self.blocks)

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
        return self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)
