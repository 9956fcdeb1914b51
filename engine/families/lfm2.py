"""lfm2: gated short convolutions, with attention in some layers.

Pre-norm blocks. A convolution layer makes two gates and what they gate in one projection; it gates, filters over a few
positions, and gates again. Queries and keys are normalised a head at a time before they rotate. The width inside the
feed-forward layer is computed from the config. The head is the embedding.

Source: Liquid AI 2025 (LFM2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import swiglu
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, as_kv
from engine.cache.recurrent import RecurrentCache, as_recurrent
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads
from engine.errors import ConfigError
from engine.gated_convolution import STATE_SLOTS, GatedConvolution
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.rope_entry import unscaled_theta
from engine.taps import tap

KINDS: Final = ("conv", "full_attention")
FIXED: Final[Mapping[str, object]] = {
    "block_use_swiglu": True,
    "hidden_act": "silu",
    "tie_embedding": True,
    "tie_word_embeddings": True,
    "use_pos_enc": True,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "block_mlp_init_scale": "used in training",
    "block_norm_eps": "norm_eps is read, in the oracle too",
    "block_out_init_scale": "used in training",
    "block_use_xavier_init": "used in training",
    "conv_dim": "always the hidden size",
    "conv_dim_out": "always the hidden size",
    "conv_use_xavier_init": "used in training",
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "num_heads": "another name of num_attention_heads",
}
DROPPED: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of an lfm2; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    norm_eps: float
    vocab_size: int
    conv_bias: bool
    conv_L_cache: int
    block_dim: int
    block_multiple_of: int
    block_ffn_dim_multiplier: float | None
    block_auto_adjust_ff_dim: bool
    block_ff_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float = 1000000.0
    rope_parameters: Mapping[str, Any] | None = None
    full_attn_idxs: tuple[int, ...] | None = None
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, layers that are not all named or named twice and differently, widths of a
                block and of the model that differ, no width inside the feed-forward layer, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_width=config.head_width,
        )
        named = config.layer_types is None or (
            len(config.layer_types) == config.num_hidden_layers and set(config.layer_types) <= set(KINDS)
        )
        listed = {i for i, kind in enumerate(config.layer_types or ()) if kind == "full_attention"}
        indices = listed if config.full_attn_idxs is None else set(config.full_attn_idxs)
        if not named or (config.layer_types and listed != indices) or not indices <= {*range(config.num_hidden_layers)}:
            raise ConfigError(
                "config.json does not say which layers attend",
                num_hidden_layers=config.num_hidden_layers,
                layer_types=", ".join(config.layer_types or ()) or "absent",
                full_attn_idxs=None if config.full_attn_idxs is None else list(config.full_attn_idxs),
                known=", ".join(KINDS),
                next_step="name every layer in layer_types, or list those that attend in full_attn_idxs",
            )
        inner = config.block_ff_dim or config.intermediate_size
        if config.block_dim != config.hidden_size or min(inner or 0, config.block_multiple_of, config.conv_L_cache) < 1:
            raise ConfigError(
                "the widths of a block do not fit together",
                hidden_size=config.hidden_size,
                block_dim=config.block_dim,
                block_ff_dim=inner,
                block_multiple_of=config.block_multiple_of,
                conv_L_cache=config.conv_L_cache,
                next_step="mend config.json",
            )
        return config

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def inner(self) -> int:
        """Width inside the feed-forward layer: two thirds, times the multiplier, rounded up, where it is to be adjusted."""
        width = self.block_ff_dim or self.intermediate_size or 0
        if not self.block_auto_adjust_ff_dim:
            return width
        width = int(2 * width / 3)
        if self.block_ffn_dim_multiplier is not None:
            width = int(self.block_ffn_dim_multiplier * width)
        return -(-width // self.block_multiple_of) * self.block_multiple_of

    def attends(self, layer: int) -> bool:
        """Whether a layer is one of attention."""
        if self.full_attn_idxs is not None:
            return layer in self.full_attn_idxs
        return self.layer_types is not None and self.layer_types[layer] == "full_attention"


def take_attention(checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> GroupedAttention:
    """Take a layer of attention from the checkpoint; the last projection and the norms have names of their own."""
    D, E, H, K, eps = (
        config.hidden_size,
        config.head_width,
        config.num_attention_heads,
        config.kv_heads,
        config.norm_eps,
    )
    return GroupedAttention(
        path=path,
        q=Linear.take(checkpoint, f"{path}.q_proj", inputs=D, outputs=H * E),
        k=Linear.take(checkpoint, f"{path}.k_proj", inputs=D, outputs=K * E),
        v=Linear.take(checkpoint, f"{path}.v_proj", inputs=D, outputs=K * E),
        o=Linear.take(checkpoint, f"{path}.out_proj", inputs=H * E, outputs=D),
        head_width=E,
        scale=E**-0.5,
        rope=rope,
        q_norm=RMSNorm.take(checkpoint, f"{path}.q_layernorm", width=E, eps=eps),
        k_norm=RMSNorm.take(checkpoint, f"{path}.k_layernorm", width=E, eps=eps),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + operator(norm(x)), then x + mlp(norm(x))."""

    path: str
    operator_norm: RMSNorm
    operator: GroupedAttention | GatedConvolution
    mlp_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope, *, attends: bool) -> "Block":
        """Take one layer from the checkpoint."""
        D, F, mlp = config.hidden_size, config.inner, f"{path}.feed_forward"
        return cls(
            path=path,
            operator_norm=RMSNorm.take(checkpoint, f"{path}.operator_norm", width=D, eps=config.norm_eps),
            operator=take_attention(checkpoint, f"{path}.self_attn", config, rope)
            if attends
            else GatedConvolution.take(
                checkpoint, f"{path}.conv", width=D, kernel=config.conv_L_cache, bias=config.conv_bias
            ),
            mlp_norm=RMSNorm.take(checkpoint, f"{path}.ffn_norm", width=D, eps=config.norm_eps),
            mlp=GatedMLP(
                path=mlp,
                gate=Linear.take(checkpoint, f"{mlp}.w1", inputs=D, outputs=F),
                up=Linear.take(checkpoint, f"{mlp}.w3", inputs=D, outputs=F),
                down=Linear.take(checkpoint, f"{mlp}.w2", inputs=F, outputs=D),
                activation=swiglu,
            ),
        )

    def __call__(self, x_BLD: mx.array, cache: Cache) -> tuple[mx.array, Cache]:
        """One layer."""
        normed = self.operator_norm(x_BLD)
        new: Cache
        if isinstance(self.operator, GroupedAttention):
            mixed, new = self.operator(normed, as_kv(cache))
        else:
            mixed, new = self.operator(normed, as_recurrent(cache))
        h_BLD = x_BLD + mixed
        return tap(self.path, h_BLD + self.mlp(self.mlp_norm(h_BLD))), new


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, blocks, final norm; the head is the embedding."""

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
        theta = unscaled_theta(config.rope_parameters, otherwise=config.rope_theta)
        rope = make_rope(config.head_width, base=theta)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=config.vocab_size, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope, attends=config.attends(i))
                for i in range(config.num_hidden_layers)
            ),
            norm=RMSNorm.take(checkpoint, "model.embedding_norm", width=D, eps=config.norm_eps),
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
        return tuple(
            PlainCache() if isinstance(block.operator, GroupedAttention) else RecurrentCache.empty(STATE_SLOTS)
            for block in self.blocks
        )

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, cache)
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.embedding.as_head(hidden_BLD)
