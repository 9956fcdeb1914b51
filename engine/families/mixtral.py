"""mixtral: a llama whose feed-forward layers are experts.

A router scores the experts, the highest few are chosen, and a softmax over the chosen scores weighs them.

Source: Jiang et al. 2024; spec/models.md section 0, rule 9.
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
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.moe import NUMBERED_NAMES, GatedExperts, weighted_sum
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "sliding_window": None,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "output_router_logits": "asks for another output in training",
    "router_aux_loss_coef": "used in training",
    "router_jitter_noise": "used in training",
}
DROPPED: Final[Mapping[str, str]] = {}
TIED: Final[Mapping[str, str]] = {r"lm_head\..*": "a copy of the embedding, to which the head is tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a mixtral; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_local_experts: int
    num_experts_per_tok: int
    vocab_size: int
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rope_traditional: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, or heads or experts that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            width=config.hidden_size,
        )
        check_experts(experts=config.num_local_experts, chosen=config.num_experts_per_tok)
        return config

    @property
    def head_width(self) -> int:
        """Elements of a head; a `head_dim` that does not share out the hidden width is refused."""
        return self.head_dim or self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertMLP:
    """The weighted sum of the experts with the highest scores.

    Attributes:
        path: Module path in the checkpoint.
        router: [X, D].
        experts: The experts.
        chosen: Experts a token.
    """

    path: str
    router: Linear
    experts: GatedExperts
    chosen: int

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config) -> "ExpertMLP":
        """Take router and experts, stacked or one by one, from the checkpoint."""
        D, X = config.hidden_size, config.num_local_experts
        return cls(
            path=path,
            router=Linear.take(checkpoint, f"{path}.gate", inputs=D, outputs=X),
            experts=GatedExperts.take(
                checkpoint,
                f"{path}.switch_mlp",
                experts=X,
                width=D,
                inner=config.intermediate_size,
                activation=swiglu,
                apart=lambda expert, name: f"{path}.experts.{expert}.{NUMBERED_NAMES[name]}",
            ),
            chosen=config.num_experts_per_tok,
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype.

        Numerics: the partition runs over negated scores and its order is the order of the sum; softmax over the chosen with
            float32 accumulation, rounded.
        """
        scores_BLX = self.router(x_BLD)
        experts_BLk = mx.argpartition(-scores_BLX, kth=self.chosen - 1, axis=-1)[..., : self.chosen]
        weights_BLk = mx.softmax(mx.take_along_axis(scores_BLX, experts_BLk, axis=-1), axis=-1, precise=True)
        return tap(self.path, weighted_sum(self.experts(x_BLD, experts_BLk), weights_BLk))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + experts(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: GroupedAttention
    post_norm: RMSNorm
    mlp: ExpertMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        D, eps = config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=GroupedAttention.take(
                checkpoint,
                f"{path}.self_attn",
                width=D,
                heads=config.num_attention_heads,
                kv_heads=config.kv_heads,
                head_width=config.head_width,
                bias=False,
                scale=config.head_width**-0.5,
                rope=rope,
            ),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=ExpertMLP.take(checkpoint, f"{path}.block_sparse_moe", config),
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
        rope = make_rope(config.head_width, base=config.rope_theta, traditional=config.rope_traditional)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope) for i in range(config.num_hidden_layers)
            ),
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
        return self.config.head_width

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
