"""glm4: a dense decoder with a norm before and after each sublayer.

Part of each head rotates, neighbouring elements as pairs; gate and up of the feed-forward layer are one projection; the head
is never tied to the embedding.

Source: spec/models.md section 8; GLM team 2024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.mlp import FusedGatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"hidden_act": "silu", "rope_scaling": None, "tie_word_embeddings": False}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "max_position_embeddings": "a promise about training; positions are not limited here",
}
DROPPED: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a glm4; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    partial_rotary_factor: float
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    rope_traditional: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, or heads that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            rotated=config.rotated,
        )
        return config

    @property
    def rotated(self) -> int:
        """Elements of a head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); the norm after a branch comes before the sum."""

    path: str
    attention_norm: RMSNorm
    attention: GroupedAttention
    after_attention: RMSNorm
    mlp_norm: RMSNorm
    mlp: FusedGatedMLP
    after_mlp: RMSNorm

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""

        def norm(name: str) -> RMSNorm:
            return RMSNorm.take(checkpoint, f"{path}.{name}", width=config.hidden_size, eps=config.rms_norm_eps)

        return cls(
            path=path,
            attention_norm=norm("input_layernorm"),
            attention=GroupedAttention.take(
                checkpoint,
                f"{path}.self_attn",
                width=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_width=config.head_dim,
                bias=config.attention_bias,
                scale=config.head_dim**-0.5,
                rope=rope,
                out_bias=False,
            ),
            after_attention=norm("post_self_attn_layernorm"),
            mlp_norm=norm("post_attention_layernorm"),  # the checkpoint's name; it stands before the feed-forward layer
            mlp=FusedGatedMLP.take(checkpoint, f"{path}.mlp", width=config.hidden_size, inner=config.intermediate_size),
            after_mlp=norm("post_mlp_layernorm"),
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer."""
        attended, cache = self.attention(self.attention_norm(x_BLD), cache)
        h_BLD = x_BLD + self.after_attention(attended)
        return tap(self.path, h_BLD + self.after_mlp(self.mlp(self.mlp_norm(h_BLD)))), cache


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
        rope = make_rope(config.rotated, base=config.rope_theta, traditional=config.rope_traditional)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope) for i in range(config.num_hidden_layers)
            ),
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
        return self.head(hidden_BLD)
