"""phi3: a llama whose projections are fused, one for queries, keys and values, one for gate and up.

The rotation may cover a part of each head, and stretches it pair by pair (longrope).

Source: spec/models.md section 8; Abdin et al. 2024; Ding et al. 2024 (longrope).
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
from engine.errors import ConfigError
from engine.linear import Embedding, Linear
from engine.mlp import FusedGatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {  # keys that have one value in this family
    "attention_bias": False,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "auto_map": "code of another library",
    "embd_pdrop": "dropout does nothing in inference",
    "resid_pdrop": "dropout does nothing in inference",
    "sliding_window": "the oracle lets every position see all earlier ones",
}
DROPPED: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a phi3; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    vocab_size: int
    num_key_value_heads: int | None = None
    rope_theta: float = 10000.0
    rope_traditional: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 131072
    original_max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, a value that this family does not have, another form of rope scaling
                than longrope, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            rotated=config.rotated,
            width=config.hidden_size,
        )
        form = (config.rope_scaling or {"type": "longrope"}).get("type")
        if form not in ("longrope", "su"):
            raise ConfigError(
                "phi3 stretches positions by longrope only",
                type=form,
                known="longrope, or su, its first name",
                next_step="use a snapshot whose rope_scaling is one of these",
            )
        return config

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def rotated(self) -> int:
        """Elements of a head that rotate."""
        return int(self.head_width * self.partial_rotary_factor)

    def rope(self) -> Rope:
        """The rotation; the original context stands beside rope_scaling, not in it."""
        scaling = self.rope_scaling and {
            **self.rope_scaling,
            "type": "longrope",
            "original_max_position_embeddings": self.original_max_position_embeddings,
        }
        return make_rope(
            self.rotated,
            base=self.rope_theta,
            traditional=self.rope_traditional,
            scaling=scaling,
            max_positions=self.max_position_embeddings,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Grouped-query self-attention from one fused projection."""

    path: str
    qkv: Linear
    o: Linear
    rope: Rope
    heads: int
    kv_heads: int

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Attention":
        """Take both projections from the checkpoint; the rows of the first are queries, keys, values."""
        D, E, H, K = config.hidden_size, config.head_width, config.num_attention_heads, config.kv_heads
        return cls(
            path=path,
            qkv=Linear.take(checkpoint, f"{path}.qkv_proj", inputs=D, outputs=(H + 2 * K) * E),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=H * E, outputs=D),
            rope=rope,
            heads=H,
            kv_heads=K,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, D = x_BLD.shape
        E = D // self.heads
        heads_BNLE = self.qkv(x_BLD).reshape(B, L, -1, E).swapaxes(1, 2)
        q_BHLE, k_BKLE, v_BKLE = mx.split(heads_BNLE, [self.heads, self.heads + self.kv_heads], axis=1)
        mask = cache.mask(L)
        q_BHLE = self.rope(q_BHLE, positions(cache))
        k_BKLE = self.rope(k_BKLE, positions(cache))
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        out_BHLE = attend(q_BHLE, keys, values, scale=E**-0.5, mask=mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: FusedGatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        D, eps = config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, rope),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=FusedGatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
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
        rope = config.rope()
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
