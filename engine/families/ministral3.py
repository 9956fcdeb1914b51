"""ministral3: a dense decoder whose queries grow with the logarithm of their position.

Pre-norm blocks, grouped-query attention with rotary positions, SwiGLU, a head that may be tied to the embedding. Beyond the
context of pre-training a query at position p is multiplied by 1 + beta * ln(1 + floor(p / context)). Layers that are named
`sliding_attention` see and remember a window of positions. On the hub a projection may have a scalar scale beside it.

Source: spec/oracles.md section 1 and its note on original_max_position_embeddings; Peng et al. 2023 (yarn).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.cache.rotating import RotatingCache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads, check_layer_types
from engine.errors import CheckpointError, ConfigError
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"hidden_act": "silu"}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "max_position_embeddings": "no rope form of this family reads it",
}
DROPPED: Final[Mapping[str, str]] = {
    r".*self_attn\.rotary_emb\.inv_freq": "computed from rope_theta",
    r".*activation_scale": "for kernels that quantise activations",
}
TIED: Final[Mapping[str, str]] = {r"(.*\.)?lm_head\.weight": "a copy of the embedding, to which the head is tied"}
SCALE: Final = ".weight_scale_inv"
BASE, BETA, CONTEXT = "rope_theta", "llama_4_scaling_beta", "original_max_position_embeddings"  # of rope_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a ministral3; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    vocab_size: int
    rope_parameters: Mapping[str, Any]
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    tie_word_embeddings: bool = True
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, an activation other than silu, rope_parameters without what attention
                needs, layers of another kind or number, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        needed = {key: config.rope_parameters.get(key) for key in (BASE, BETA, CONTEXT)}
        if not all(isinstance(value, int | float) and value > 0 for value in needed.values()):
            raise ConfigError(
                "rope_parameters lack a positive number that ministral3 needs", **needed, next_step="mend config.json"
            )
        kinds, window = config.layer_types, config.sliding_window
        if kinds is not None:
            check_layer_types(raw, kinds, layers=config.num_hidden_layers, window=window)
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

    def window(self, layer: int) -> int | None:
        """Positions that a layer sees; None for all."""
        sliding = self.layer_types is not None and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    def rope(self) -> Rope:
        """The rotation of every layer."""
        scaling = {k: v for k, v in self.rope_parameters.items() if k not in (BASE, BETA)}
        if scaling.get("rope_type", scaling.get("type", "default")) == "default":
            del scaling[CONTEXT]  # attention alone reads it then
        return make_rope(self.head_width, base=self.rope_parameters[BASE], scaling=scaling)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Grouped-query self-attention with rotary positions and queries that grow."""

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    rope: Rope
    head_width: int
    window: int | None

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope, window: int | None) -> "Attention":
        """Take the four projections from the checkpoint."""
        D, E, H, K = config.hidden_size, config.head_width, config.num_attention_heads, config.kv_heads
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.q_proj", inputs=D, outputs=H * E),
            k=Linear.take(checkpoint, f"{path}.k_proj", inputs=D, outputs=K * E),
            v=Linear.take(checkpoint, f"{path}.v_proj", inputs=D, outputs=K * E),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=H * E, outputs=D),
            rope=rope,
            head_width=E,
            window=window,
        )

    def __call__(self, x_BLD: mx.array, growth_L1: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache.

        Numerics: queries are multiplied by their growth after rotation.
        """
        B, L, _ = x_BLD.shape
        q_BHLE, k_BKLE, v_BKLE = (
            projection(x_BLD).reshape(B, L, -1, self.head_width).swapaxes(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mask = cache.mask(L, window=self.window)
        q_BHLE = self.rope(q_BHLE, cache.offset) * growth_L1
        k_BKLE = self.rope(k_BKLE, cache.offset)
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        out_BHLE = attend(q_BHLE, keys, values, scale=self.head_width**-0.5, mask=mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache


def query_growth(config: Config, x_BLD: mx.array, offset: int) -> mx.array:
    """1 + beta * ln(1 + floor(p / context)) at positions p of offset..offset+L-1, [L, 1].

    Numerics: float32, rounded to the dtype of the embedded tokens x. That is bfloat16 wherever the table is packed as small
        floats (mxfp4, nvfp4, mxfp8), in a float32 model too: mlx dequantises those to bfloat16.
    """
    positions_L = mx.arange(offset, offset + x_BLD.shape[1])
    turns_L = mx.floor(positions_L / config.rope_parameters[CONTEXT])
    growth_L: mx.array = 1 + config.rope_parameters[BETA] * mx.log(1 + turns_L)
    return growth_L[:, None].astype(x_BLD.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope, window: int | None) -> "Block":
        """Take one layer from the checkpoint."""
        D, eps = config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, rope, window),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
        )

    def __call__(self, x_BLD: mx.array, growth_L1: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer."""
        attended, cache = self.attention(self.input_norm(x_BLD), growth_L1, cache)
        h_BLD = x_BLD + attended
        return tap(self.path, h_BLD + self.mlp(self.post_norm(h_BLD))), cache


def undo_hub_layout(checkpoint: Checkpoint) -> None:
    """Multiply every weight that has a scale beside it by that scale, in their dtype as stored.

    Raises:
        CheckpointError: A scale has no weight, or one whose elements are 8-bit codes.
    """
    for scale in [name for name in checkpoint.names if name.endswith(SCALE)]:
        weight = scale.removesuffix("_scale_inv")
        checkpoint.replace([weight, scale], [weight], lambda *pair, name=weight: [_scaled(name, *pair)])


def _scaled(name: str, weight: mx.array, scale: mx.array) -> mx.array:
    if not mx.issubdtype(weight.dtype, mx.floating):
        raise CheckpointError(
            f"tensor {name} is stored as 8-bit floats, which mlx hands out as integers",
            found=str(weight.dtype),
            next_step="use a snapshot that was dequantised to bfloat16",
        )
    return weight * scale


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
        undo_hub_layout(checkpoint)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope, config.window(i))
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
        windows = (block.attention.window for block in self.blocks)
        return tuple(RotatingCache(max_size=window) if window else PlainCache() for window in windows)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        growth_L1 = query_growth(self.config, x_BLD, caches[0].offset)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, growth_L1, as_kv(cache))
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)
