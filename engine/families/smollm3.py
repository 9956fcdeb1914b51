"""smollm3: a dense decoder of which some layers have no rotary positions.

Pre-norm blocks, grouped-query attention, SwiGLU, a head that may be tied to the embedding. Layers without rotation tell
order by the causal mask alone; by default every fourth one is such a layer.

Source: spec/models.md section 8; Kazemnejad et al. 2023 (attention without positions).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads, check_layer_types
from engine.errors import ConfigError
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"hidden_act": "silu", "use_sliding_window": False}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "max_position_embeddings": "no rope form of this family reads it",
    "sliding_window": "read only for sliding layers, of which there are none",
}
DROPPED: Final[Mapping[str, str]] = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "computed from rope_theta",
}
TIED: Final[Mapping[str, str]] = {r"lm_head\.weight": "a copy of the embedding, to which the head is tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a smollm3; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    vocab_size: int
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_traditional: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = True
    no_rope_layer_interval: int = 4
    no_rope_layers: tuple[int, ...] | None = None
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, an activation other than silu, windows, a list of rotated layers that
                does not name every layer, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        if config.layer_types is not None:
            check_layer_types(raw, config.layer_types, layers=config.num_hidden_layers, slides=False)
        listed = config.no_rope_layers
        if config.no_rope_layer_interval < 1 if listed is None else len(listed) != config.num_hidden_layers:
            raise ConfigError(
                "config.json does not say which layers rotate",
                no_rope_layers=None if listed is None else f"{len(listed)} entries",
                no_rope_layer_interval=config.no_rope_layer_interval,
                num_hidden_layers=config.num_hidden_layers,
                next_step="list 1 (rotated) or 0 for every layer in no_rope_layers, or give an interval of 1 or more",
            )
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

    def rotates(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: GroupedAttention
    post_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope | None) -> "Block":
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
                bias=config.attention_bias,
                scale=config.head_width**-0.5,
                rope=rope,
            ),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size, bias=config.mlp_bias),
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
        rope = make_rope(
            config.head_width,
            base=config.rope_theta,
            traditional=config.rope_traditional,
            scaling=config.rope_scaling,
        )
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope if config.rotates(i) else None)
                for i in range(config.num_hidden_layers)
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
