"""minicpm: a llama with three constants: on the embedding, on each residual branch, and under the head.

The head divides by hidden_size / dim_model_base, tied or not. The oracle cannot load a tied snapshot; there the published
model definition, which divides in both, is followed.

Source: spec/models.md section 8 (llama); Hu et al. 2024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.errors import ConfigError
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

IRRELEVANT: Final[Mapping[str, str]] = {
    "attention_bias": "always false in this family; another value is refused below",
    "auto_map": "code of another library",
    "hidden_act": "always silu in this family; another value is refused below",
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
        if raw.get("hidden_act", "silu") != "silu" or raw.get("attention_bias", False) is not False:
            raise ConfigError(
                "minicpm computes silu, and attention without biases, only",
                hidden_act=raw.get("hidden_act", "silu"),
                attention_bias=raw.get("attention_bias", False),
                next_step="mend config.json",
            )
        H, K = config.num_attention_heads, config.num_key_value_heads
        if min(H, K, config.dim_model_base) < 1 or config.hidden_size % H or H % K or config.head_width % 2:
            raise ConfigError(
                "the sizes of config.json do not fit together",
                hidden_size=config.hidden_size,
                num_attention_heads=H,
                num_key_value_heads=K,
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
class Attention:
    """Grouped-query self-attention with rotary positions."""

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    rope: Rope
    head_width: int

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Attention":
        """Take the four projections from the checkpoint."""
        D, KE = config.hidden_size, config.num_key_value_heads * config.head_width
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.q_proj", inputs=D, outputs=D),
            k=Linear.take(checkpoint, f"{path}.k_proj", inputs=D, outputs=KE),
            v=Linear.take(checkpoint, f"{path}.v_proj", inputs=D, outputs=KE),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=D, outputs=D),
            rope=rope,
            head_width=config.head_width,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        q_BHLE, k_BKLE, v_BKLE = (
            projection(x_BLD).reshape(B, L, -1, self.head_width).swapaxes(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mask = cache.mask(L)
        q_BHLE = self.rope(q_BHLE, cache.offset)
        k_BKLE = self.rope(k_BKLE, cache.offset)
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        out_BHLE = attend(q_BHLE, keys, values, scale=self.head_width**-0.5, mask=mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: Attention
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
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, rope),
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
