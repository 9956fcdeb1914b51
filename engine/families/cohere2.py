"""cohere2: parallel blocks, in which attention and mlp read the same norm and are added to the residual together.

Layers that see a window of positions rotate neighbouring pairs; every `sliding_window_pattern`-th layer sees all positions
and knows none (no rotation). The head is the embedding, its logits scaled.

Source: spec/oracles.md section 1; Cohere et al. 2025.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv, positions
from engine.cache.rotating import RotatingCache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads
from engine.errors import ConfigError
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import LayerNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {  # keys that have one value in this family
    "hidden_act": "silu",
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rotary_pct": 1.0,
    "tie_word_embeddings": True,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "cache_implementation": "how another library keeps keys and values",
    "max_position_embeddings": "the rotation is not scaled",
    "use_parallel_embedding": "how training was split over machines",
}
DROPPED: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a cohere2; field names are its keys."""

    hidden_size: int = 4096
    head_dim: int = 128
    num_hidden_layers: int = 32
    intermediate_size: int = 14336
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    rope_theta: float = 50000.0
    vocab_size: int = 256000
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    attention_bias: bool = False
    layer_norm_bias: bool = False
    sliding_window: int = 4096
    sliding_window_pattern: int = 4
    layer_switch: int | None = None
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, a value that this family does not have, layers that contradict the
                pattern, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        pattern, layers = config.sliding_window_pattern, config.num_hidden_layers
        if min(pattern, config.sliding_window) < 1 or config.layer_switch not in (None, pattern):
            raise ConfigError(
                "the pattern of layers does not fit together",
                sliding_window=config.sliding_window,
                sliding_window_pattern=pattern,
                layer_switch="absent" if config.layer_switch is None else config.layer_switch,
                next_step="mend config.json",
            )
        kinds = tuple("full_attention" if config.window(i) is None else "sliding_attention" for i in range(layers))
        if config.layer_types not in (None, kinds):
            raise ConfigError(
                "layer_types contradicts sliding_window_pattern",
                layer_types=", ".join(config.layer_types or ()),
                expected=", ".join(kinds),
                next_step="mend config.json",
            )
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            width=config.hidden_size,
        )
        return config

    def window(self, layer: int) -> int | None:
        """Positions that a layer sees; None for all."""
        return None if (layer + 1) % self.sliding_window_pattern == 0 else self.sliding_window


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Grouped-query self-attention; rotated, and of a window, or neither (rope and window are None together)."""

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    rope: Rope | None
    window: int | None
    head_width: int

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, window: int | None) -> "Attention":
        """Take the four projections from the checkpoint."""
        D, E = config.hidden_size, config.head_dim

        def projection(name: str, outputs: int) -> Linear:
            return Linear.take(checkpoint, f"{path}.{name}", inputs=D, outputs=outputs, bias=config.attention_bias)

        return cls(
            path=path,
            q=projection("q_proj", D),
            k=projection("k_proj", config.num_key_value_heads * E),
            v=projection("v_proj", config.num_key_value_heads * E),
            o=projection("o_proj", D),
            rope=None if window is None else make_rope(E, base=config.rope_theta, traditional=True),
            window=window,
            head_width=E,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to what the layer sees; returns [B, L, D] and the longer cache.

        Numerics: float16 queries attend in float32, and the result is rounded back.
        """
        B, L, _ = x_BLD.shape
        q_BHLE, k_BKLE, v_BKLE = (
            projection(x_BLD).reshape(B, L, -1, self.head_width).swapaxes(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mask = cache.mask(L, window=self.window)
        if self.rope is not None:
            q_BHLE = self.rope(q_BHLE, positions(cache))
            k_BKLE = self.rope(k_BKLE, positions(cache))
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        wide = q_BHLE.astype(mx.float32) if q_BHLE.dtype == mx.float16 else q_BHLE
        out_BHLE = attend(wide, keys, values, scale=self.head_width**-0.5, mask=mask).astype(q_BHLE.dtype)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """attention(norm(x)) + mlp(norm(x)) + x."""

    path: str
    norm: LayerNorm
    attention: Attention
    mlp: GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, window: int | None) -> "Block":
        """Take one layer from the checkpoint."""
        return cls(
            path=path,
            norm=_norm(checkpoint, f"{path}.input_layernorm", config),
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, window),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=config.hidden_size, inner=config.intermediate_size),
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer.

        Numerics: the two branches are added first, and rounded, then the residual.
        """
        normed_BLD = self.norm(x_BLD)
        attended, cache = self.attention(normed_BLD, cache)
        return tap(self.path, attended + self.mlp(normed_BLD) + x_BLD), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, which is the head too, blocks, final norm."""

    config: Config
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: LayerNorm

    @classmethod
    def build(cls, raw: Mapping[str, Any], checkpoint: Checkpoint) -> "Model":
        """Build from config.json and its checkpoint, using every tensor once.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        config = Config.read(raw)
        model = cls(
            config=config,
            embedding=Embedding.take(
                checkpoint, "model.embed_tokens", vocabulary=config.vocab_size, width=config.hidden_size
            ),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, config.window(i))
                for i in range(config.num_hidden_layers)
            ),
            norm=_norm(checkpoint, "model.norm", config),
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
        return self.config.head_dim

    @property
    def no_packed_kv(self) -> str | None:
        """Keys and values may be packed, in rings too."""
        return None

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        windows = (block.attention.window for block in self.blocks)
        return tuple(PlainCache() if window is None else RotatingCache(max_size=window) for window in windows)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, as_kv(cache))
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states.

        Numerics: the scale is rounded to the logits' dtype and applied to the rounded product.
        """
        return self.embedding.as_head(hidden_BLD) * self.config.logit_scale


def _norm(checkpoint: Checkpoint, path: str, config: Config) -> LayerNorm:
    return LayerNorm.take(
        checkpoint, path, width=config.hidden_size, eps=config.layer_norm_eps, bias=config.layer_norm_bias
    )
