"""minicpm: a llama with three constants: on the embedding, on each residual branch, and under the head.

The head divides by hidden_size / dim_model_base, tied or not. The oracle cannot load a tied snapshot; there the published
model definition, which divides in both, is followed.

Source: spec/models.md section 8 (llama); Hu et al. 2024.
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
from engine.errors import ConfigError
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"attention_bias": False, "hidden_act": "silu"}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "auto_map": "code of another library",
}
DROPPED: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a minicpm; field names are its keys.

    Attributes:
        rope_theta: The default is the oracle's.
    """

    hidden_size: int
    dim_model_base: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    vocab_size: int
    num_key_value_heads: int
    scale_depth: float
    scale_emb: float
    max_position_embeddings: int | None = None
    rope_theta: float = 1000000.0
    rope_traditional: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, an activation other than silu, a bias, or sizes that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_width,
            width=config.hidden_size,
        )
        if config.dim_model_base < 1:
            raise ConfigError(
                "the head of minicpm divides by hidden_size / dim_model_base",
                dim_model_base=config.dim_model_base,
                next_step="mend config.json",
            )
        return config

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def branch_scale(self) -> float:
        """Factor on what attention and mlp add to the residual."""
        scale: float = self.scale_depth / self.num_hidden_layers**0.5
        return scale

    @property
    def head_divisor(self) -> float:
        """What hidden states are divided by before the head."""
        return self.hidden_size / self.dim_model_base


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: GroupedAttention
    post_norm: RMSNorm
    mlp: GatedMLP
    scale: float

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
                kv_heads=config.num_key_value_heads,
                head_width=config.head_width,
                bias=False,
                scale=config.head_width**-0.5,
                rope=rope,
            ),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
            scale=config.branch_scale,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer.

        Numerics: the scale is rounded to x's dtype, its product with a branch too, before the sum is.
        """
        attended, cache = self.attention(self.input_norm(x_BLD), cache)
        h_BLD = x_BLD + attended * self.scale
        return tap(self.path, h_BLD + self.mlp(self.post_norm(h_BLD)) * self.scale), cache


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
        rope = make_rope(
            config.head_width,
            base=config.rope_theta,
            traditional=config.rope_traditional,
            scaling=config.rope_scaling,
            max_positions=config.max_position_embeddings,
        )
        embedding = Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D)
        model = cls(
            config=config,
            embedding=embedding,
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope) for i in range(config.num_hidden_layers)
            ),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps),
            head=None if config.tie_word_embeddings else _head(checkpoint, embedding, inputs=D, outputs=V),
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
        """Hidden states [B, L, D] after the final norm, and the longer caches.

        Numerics: the scaled embedding is rounded to its dtype.
        """
        x_BLD = self.embedding(ids_BL) * self.config.scale_emb
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, as_kv(cache))
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states.

        Numerics: hidden states are divided (not multiplied by a reciprocal) and rounded, then projected.
        """
        divided = hidden_BLD / self.config.head_divisor
        return self.embedding.as_head(divided) if self.head is None else self.head(divided)


def _head(checkpoint: Checkpoint, embedding: Embedding, *, inputs: int, outputs: int) -> Linear:
    """The head of an untied config; snapshots on the hub may leave it out, and then mean the embedding."""
    if "lm_head.weight" in checkpoint:
        return Linear.take(checkpoint, "lm_head", inputs=inputs, outputs=outputs)
    return Linear(path="lm_head", weight=embedding.weight)
