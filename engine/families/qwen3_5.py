"""qwen3_5: three layers of gated delta rule to one of gated attention, dense, inside the wrapper of a model that sees.

The language model alone is computed. Layer i attends to all positions if (i + 1) is a multiple of
`full_attention_interval`; the others keep a convolution's window and a matrix a head. A text has the same position on all
three axes of the rotation that the wrapper divides for images, so it rotates as any other.

Source: spec/models.md section 4.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, as_kv
from engine.cache.recurrent import RecurrentCache, as_recurrent
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_full_attention, check_heads
from engine.gated_attention import GatedAttention
from engine.gated_delta import STATE_SLOTS, DeltaHeads, GatedDeltaMixer
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.qwen3_5_wrapper import (
    BODY,
    DROPPED,
    FIXED,
    HEAD,
    IRRELEVANT,
    LANGUAGE_MODEL,
    TextRotation,
    convert_names,
    text_config,
)
from engine.taps import tap

TIED: Final[Mapping[str, str]] = {rf"{re.escape(HEAD)}\..*": "a copy of the embedding, to which the head is tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """text_config of a qwen3_5's config.json, or all of it where there is no wrapper; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    rms_norm_eps: float
    vocab_size: int
    linear_conv_kernel_dim: int = 4
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_parameters: Mapping[str, Any] | None = None
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, or heads or layers that do not fit together.
        """
        text = text_config(raw)
        config = read_config(cls, text, irrelevant=IRRELEVANT)
        check_fixed(text, FIXED)
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_width,
            rotated=config.rotation.width,
        )
        config.delta_heads.check()
        check_full_attention(
            layers=config.num_hidden_layers, interval=config.full_attention_interval, layer_types=config.layer_types
        )
        return config

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def rotation(self) -> TextRotation:
        """How the heads of attention rotate."""
        return TextRotation.read(self.rope_parameters, head_width=self.head_width)

    @property
    def delta_heads(self) -> DeltaHeads:
        """Sizes of the linear layers."""
        return DeltaHeads(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_width=self.linear_key_head_dim,
            value_width=self.linear_value_head_dim,
            kernel=self.linear_conv_kernel_dim,
        )

    def is_linear(self, layer: int) -> bool:
        """Whether a layer runs the delta rule rather than attention."""
        return (layer + 1) % self.full_attention_interval != 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearAttention:
    """The delta rule's mixer behind four projections."""

    qkv: Linear
    z: Linear
    b: Linear
    a: Linear
    mixer: GatedDeltaMixer

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, width: int, heads: DeltaHeads, eps: float, hub: bool
    ) -> "LinearAttention":
        """Take projections and mixer from the checkpoint."""

        def projection(name: str, outputs: int) -> Linear:
            return Linear.take(checkpoint, f"{path}.{name}", inputs=width, outputs=outputs)

        return cls(
            qkv=projection("in_proj_qkv", heads.channels),
            z=projection("in_proj_z", heads.values),
            b=projection("in_proj_b", heads.value_heads),
            a=projection("in_proj_a", heads.value_heads),
            mixer=GatedDeltaMixer.take(checkpoint, path, heads=heads, width=width, eps=eps, channels_first=hub),
        )

    def __call__(self, x_BLD: mx.array, cache: RecurrentCache) -> tuple[mx.array, RecurrentCache]:
        """Mix [B, L, D] with what the cache remembers; returns [B, L, D] and the new cache."""
        B, L, _ = x_BLD.shape
        z_BLHV = self.z(x_BLD).reshape(B, L, self.mixer.heads.value_heads, -1)
        return self.mixer(self.qkv(x_BLD), z_BLHV, self.b(x_BLD), self.a(x_BLD), cache)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: GatedAttention | LinearAttention
    post_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, *, hub: bool) -> "Block":
        """Take one layer from the checkpoint."""
        path, D, eps = f"{BODY}.layers.{layer}", config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps, stored_less_one=hub),
            attention=LinearAttention.take(
                checkpoint, f"{path}.linear_attn", width=D, heads=config.delta_heads, eps=eps, hub=hub
            )
            if config.is_linear(layer)
            else GatedAttention.take(
                checkpoint,
                f"{path}.self_attn",
                width=D,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_width=config.head_width,
                bias=config.attention_bias,
                eps=eps,
                rope=config.rotation.rope,
                norms_less_one=hub,
            ),
            post_norm=RMSNorm.take(
                checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps, stored_less_one=hub
            ),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
        )

    def __call__(self, x_BLD: mx.array, cache: Cache) -> tuple[mx.array, Cache]:
        """One layer."""
        normed_BLD = self.input_norm(x_BLD)
        mixed_BLD: mx.array
        if isinstance(self.attention, LinearAttention):
            mixed_BLD, cache = self.attention(normed_BLD, as_recurrent(cache))
        else:
            mixed_BLD, cache = self.attention(normed_BLD, as_kv(cache))
        h_BLD = x_BLD + mixed_BLD
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

        Filters [C, 1, K] mark a checkpoint as the hub's: norms are stored less one there.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        config = Config.read(raw)
        D, V = config.hidden_size, config.vocab_size
        hub = convert_names(checkpoint)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, f"{BODY}.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(Block.take(checkpoint, i, config, hub=hub) for i in range(config.num_hidden_layers)),
            norm=RMSNorm.take(checkpoint, f"{BODY}.norm", width=D, eps=config.rms_norm_eps, stored_less_one=hub),
            head=None if config.tie_word_embeddings else Linear.take(checkpoint, HEAD, inputs=D, outputs=V),
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
        """Keys and values may be packed; the state of the linear layers stays as it is."""
        return None

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        linear = (isinstance(block.attention, LinearAttention) for block in self.blocks)
        return tuple(RecurrentCache.empty(STATE_SLOTS) if is_linear else PlainCache() for is_linear in linear)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the new caches."""
        x_BLD = self.embedding(ids_BL)
        after: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, cache)
            after.append(new)
        return tap(BODY, self.norm(x_BLD)), tuple(after)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        logits_BLV = self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)
        return tap(LANGUAGE_MODEL, logits_BLV)
