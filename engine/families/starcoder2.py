"""starcoder2: LayerNorm with biases, biases in every linear layer, and a feed-forward layer without a gate.

Grouped-query attention with rotary positions over all positions; the exact gelu (erf), which is what the oracle computes
whatever `hidden_act` says; a head that may be tied to the embedding. A `sliding_window` bounds nothing, as in the oracle.

Source: spec/models.md section 8; Lozhkov et al. 2024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import gelu
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.norm import LayerNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {
    "mlp_type": "default",  # without a gate
    "norm_type": "layer_norm",
    "rope_scaling": None,
    "use_bias": True,  # in every linear layer
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "embedding_dropout": "dropout does nothing in inference",
    "hidden_act": "the oracle computes the exact gelu under either of its names",
    "max_position_embeddings": "the rotation is not scaled",
    "residual_dropout": "dropout does nothing in inference",
    "sliding_window": "the oracle's layers see every position",
}
DROPPED: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a starcoder2; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    norm_epsilon: float = 1e-5
    vocab_size: int = 49152
    rope_theta: float = 100000.0
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, no biases, another norm or layer, rope scaling, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_width=config.head_width)
        return config

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.hidden_size // max(self.num_attention_heads, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLP:
    """c_proj(gelu(c_fc(x)))."""

    path: str
    up: Linear
    down: Linear

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config) -> "MLP":
        """Take `c_fc` and `c_proj` from the checkpoint."""
        D, F = config.hidden_size, config.intermediate_size
        return cls(
            path=path,
            up=Linear.take(checkpoint, f"{path}.c_fc", inputs=D, outputs=F, bias=True),
            down=Linear.take(checkpoint, f"{path}.c_proj", inputs=F, outputs=D, bias=True),
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype."""
        return tap(self.path, self.down(gelu(self.up(x_BLD))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: LayerNorm
    attention: GroupedAttention
    post_norm: LayerNorm
    mlp: MLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        D, eps = config.hidden_size, config.norm_epsilon
        return cls(
            path=path,
            input_norm=LayerNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=GroupedAttention.take(
                checkpoint,
                f"{path}.self_attn",
                width=D,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_width=config.head_width,
                bias=True,
                scale=config.head_width**-0.5,
                rope=rope,
            ),
            post_norm=LayerNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=MLP.take(checkpoint, f"{path}.mlp", config),
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
    norm: LayerNorm
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
        rope = make_rope(config.head_width, base=config.rope_theta)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope) for i in range(config.num_hidden_layers)
            ),
            norm=LayerNorm.take(checkpoint, "model.norm", width=D, eps=config.norm_epsilon),
            head=None if config.tie_word_embeddings else Linear.take(checkpoint, "lm_head", inputs=D, outputs=V),
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
