"""olmo2: a decoder that normalises what its layers put out rather than what they take in.

The norms of queries and keys go over the whole projection, before it is cut into heads. Every layer sees all positions.

Source: spec/models.md section 8; OLMo et al. 2024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv, positions
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"hidden_act": "silu"}
IRRELEVANT: Final[Mapping[str, str]] = dict.fromkeys(FIXED, "one value only; another is refused")
DROPPED: Final[Mapping[str, str]] = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "computed from rope_theta",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of an olmo2; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    vocab_size: int
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    max_position_embeddings: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_traditional: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, an activation other than silu, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(heads=config.num_attention_heads, kv_heads=config.kv_heads, head_width=config.head_width)
        return config

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Grouped-query self-attention whose queries and keys are normalised over all heads at once."""

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
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Attention":
        """Take four projections and two norms from the checkpoint."""
        D, E, eps = config.hidden_size, config.head_width, config.rms_norm_eps
        HE, KE = config.num_attention_heads * E, config.kv_heads * E

        def projection(name: str, inputs: int, outputs: int) -> Linear:
            return Linear.take(checkpoint, f"{path}.{name}", inputs=inputs, outputs=outputs, bias=config.attention_bias)

        return cls(
            path=path,
            q=projection("q_proj", D, HE),
            k=projection("k_proj", D, KE),
            v=projection("v_proj", D, KE),
            o=projection("o_proj", HE, D),
            q_norm=RMSNorm.take(checkpoint, f"{path}.q_norm", width=HE, eps=eps),
            k_norm=RMSNorm.take(checkpoint, f"{path}.k_norm", width=KE, eps=eps),
            rope=rope,
            head_width=E,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        projected = (self.q_norm(self.q(x_BLD)), self.k_norm(self.k(x_BLD)), self.v(x_BLD))
        q_BHLE, k_BKLE, v_BKLE = (x.reshape(B, L, -1, self.head_width).swapaxes(1, 2) for x in projected)
        mask = cache.mask(L)
        q_BHLE, k_BKLE = self.rope(q_BHLE, positions(cache)), self.rope(k_BKLE, positions(cache))
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        out_BHLE = attend(q_BHLE, keys, values, scale=self.head_width**-0.5, mask=mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    path: str
    attention: Attention
    attention_norm: RMSNorm
    mlp: GatedMLP
    mlp_norm: RMSNorm

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        D, eps = config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, rope),
            attention_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size, bias=config.mlp_bias),
            mlp_norm=RMSNorm.take(checkpoint, f"{path}.post_feedforward_layernorm", width=D, eps=eps),
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer."""
        attended, cache = self.attention(x_BLD, cache)
        h_BLD = x_BLD + self.attention_norm(attended)
        return tap(self.path, h_BLD + self.mlp_norm(self.mlp(h_BLD))), cache


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
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope) for i in range(config.num_hidden_layers)
            ),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps),
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
