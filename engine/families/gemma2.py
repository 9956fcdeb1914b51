"""gemma2: soft-capped attention scores, a norm before and after each half of a block, norms that multiply by 1 + w.

Every layer sees every position: the oracle does not read `sliding_window`, so past that many tokens both differ from the
model as it was trained. The head is the embedding, and its logits are soft-capped.

Source: spec/models.md section 8; Gemma Team 2024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import geglu_approx, soft_capped
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv, positions
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.errors import ConfigError
from engine.linear import Embedding, Linear
from engine.mask import Mask, causal_matrix
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

IRRELEVANT: Final[Mapping[str, str]] = {
    "cache_implementation": "an option of another library",
    "hidden_act": "always the tanh form of gelu in this family; another value is refused below",
    "hidden_activation": "as hidden_act",
    "max_position_embeddings": "nothing is computed from it",
    "sliding_window": "the oracle lets every layer see every position",
    "tie_word_embeddings": "always tied in this family; another value is refused below",
}
GELU: Final = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a gemma2; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    attention_bias: bool = False
    attn_logit_softcapping: float = 50.0
    final_logit_softcapping: float = 30.0
    query_pre_attn_scalar: float = 144.0
    rope_theta: float = 10000.0
    rope_traditional: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, another activation, biases, an untied head, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        for key in ("hidden_act", "hidden_activation"):
            if raw.get(key, GELU) != GELU:
                raise ConfigError(f"gemma2 computes {GELU} only", **{key: raw[key]}, next_step="mend config.json")
        if config.attention_bias or raw.get("tie_word_embeddings", True) is not True:
            raise ConfigError(
                "gemma2 has no biases in attention and no head of its own",
                attention_bias=config.attention_bias,
                tie_word_embeddings=raw.get("tie_word_embeddings", True),
                next_step="mend config.json",
            )
        if config.num_key_value_heads < 1 or config.num_attention_heads % config.num_key_value_heads:
            raise ConfigError(
                "the heads of config.json do not fit together",
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                next_step="mend config.json",
            )
        return config


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Grouped-query self-attention whose scores are soft-capped before the mask."""

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    rope: Rope
    config: Config

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Attention":
        """Take the four projections from the checkpoint."""
        D, E = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.q_proj", inputs=D, outputs=H * E),
            k=Linear.take(checkpoint, f"{path}.k_proj", inputs=D, outputs=K * E),
            v=Linear.take(checkpoint, f"{path}.v_proj", inputs=D, outputs=K * E),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=H * E, outputs=D),
            rope=rope,
            config=config,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        q_BHLE, k_BKLE, v_BKLE = (
            projection(x_BLD).reshape(B, L, -1, self.config.head_dim).swapaxes(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mask = cache.mask(L, as_array=True)
        q_BHLE = self.rope(q_BHLE, positions(cache))
        k_BKLE = self.rope(k_BKLE, positions(cache))
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
            raise TypeError("soft-capped attention needs plain keys and values")
        out_BHLE = self._attend(q_BHLE, keys, values, mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache

    def _attend(self, q_BHLE: mx.array, k_BKTE: mx.array, v_BKTE: mx.array, mask: Mask) -> mx.array:
        """softmax(cap(q k^T / sqrt(query_pre_attn_scalar)) + mask) v, [B, H, L, E].

        Numerics: each operation is rounded; masked scores are the dtype's lowest finite value; softmax accumulates in float32.
        """
        B, H, L, E = q_BHLE.shape
        K, T = k_BKTE.shape[1:3]
        scaled = q_BHLE * (1.0 / self.config.query_pre_attn_scalar**0.5)
        scores_BKGLT = scaled.reshape(B, K, H // K, L, E) @ mx.expand_dims(k_BKTE, 2).swapaxes(-1, -2)
        scores_BKGLT = soft_capped(scores_BKGLT, self.config.attn_logit_softcapping)
        if mask is not None:
            allowed = causal_matrix(L, before=T - L) if isinstance(mask, str) else mask
            scores_BKGLT = mx.where(allowed, scores_BKGLT, mx.finfo(scores_BKGLT.dtype).min)
        weights_BKGLT = mx.softmax(scores_BKGLT, axis=-1, precise=True)
        return (weights_BKGLT @ mx.expand_dims(v_BKTE, 2)).reshape(B, H, L, E)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    path: str
    input_norm: RMSNorm
    attention: Attention
    attention_norm: RMSNorm
    mlp_input_norm: RMSNorm
    mlp: GatedMLP
    mlp_norm: RMSNorm

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        D = config.hidden_size

        def norm(name: str) -> RMSNorm:
            return RMSNorm.take(checkpoint, f"{path}.{name}", width=D, eps=config.rms_norm_eps, plus_one=True)

        return cls(
            path=path,
            input_norm=norm("input_layernorm"),
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, rope),
            attention_norm=norm("post_attention_layernorm"),
            mlp_input_norm=norm("pre_feedforward_layernorm"),
            mlp=GatedMLP.take(
                checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size, activation=geglu_approx
            ),
            mlp_norm=norm("post_feedforward_layernorm"),
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer."""
        attended, cache = self.attention(self.input_norm(x_BLD), cache)
        h_BLD = x_BLD + self.attention_norm(attended)
        return tap(self.path, h_BLD + self.mlp_norm(self.mlp(self.mlp_input_norm(h_BLD)))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, blocks, final norm; the embedding is the head."""

    config: Config
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm

    @classmethod
    def build(cls, raw: Mapping[str, Any], checkpoint: Checkpoint) -> "Model":
        """Build from config.json and its checkpoint, using every tensor once.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        config = Config.read(raw)
        D = config.hidden_size
        rope = make_rope(config.head_dim, base=config.rope_theta, traditional=config.rope_traditional)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=config.vocab_size, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope) for i in range(config.num_hidden_layers)
            ),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps, plus_one=True),
        )
        checkpoint.finish(dropped={})
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
        """Keys and values stay as computed."""
        return "gemma2 caps its scores, for which the oracle multiplies plain keys"

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        return tuple(PlainCache() for _ in self.blocks)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches.

        Numerics: the embedding's factor sqrt(D) is rounded to its dtype.
        """
        x_BLD = self.embedding(ids_BL) * self.config.hidden_size**0.5
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, as_kv(cache))
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Soft-capped logits [B, L, V] of hidden states."""
        return soft_capped(self.embedding.as_head(hidden_BLD), self.config.final_logit_softcapping)
