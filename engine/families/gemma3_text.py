"""gemma3_text: windows of positions with a full layer after every few, two rotations, norms that multiply by 1 + w.

Layer i sees every position where i + 1 is a multiple of `sliding_window_pattern`; the others see a window and rotate with
`rope_local_base_freq`. Queries and keys are normalised a head at a time. The head is the embedding where the checkpoint
has no head of its own.

Source: spec/models.md sections 0 and 8; Gemma Team 2025.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import geglu_approx
from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv, positions
from engine.cache.rotating import RotatingCache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.errors import ConfigError
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

IRRELEVANT: Final[Mapping[str, str]] = {
    "cache_implementation": "an option of another library",
    "max_position_embeddings": "nothing is computed from it",
}
ONLY: Final[Mapping[str, object]] = {  # keys with one value that this family computes
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a gemma3_text; field names are its keys."""

    hidden_size: int = 1152
    num_hidden_layers: int = 26
    intermediate_size: int = 6912
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    vocab_size: int = 262144
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    query_pre_attn_scalar: float = 256.0
    sliding_window: int = 512
    sliding_window_pattern: int = 6
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, a key of `ONLY` with another value, layer types that contradict the
                pattern, a window that is none, or heads that do not fit.
        """
        config = read_config(
            cls,
            {key: value for key, value in raw.items() if key != "_sliding_window_pattern"},
            irrelevant={**IRRELEVANT, **dict.fromkeys(ONLY, "one value only, checked below")},
        )
        for key, value in ONLY.items():
            if raw.get(key, value) != value:
                raise ConfigError(
                    f"gemma3_text computes one {key} only", found=raw[key], known=value, next_step="mend config.json"
                )
        _check_layers(config, raw.get("_sliding_window_pattern"))
        if config.num_key_value_heads < 1 or config.num_attention_heads % config.num_key_value_heads:
            raise ConfigError(
                "the heads of config.json do not fit together",
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                next_step="mend config.json",
            )
        return config

    def window(self, layer: int) -> int | None:
        """Positions that a layer sees; None for all."""
        return self.sliding_window if (layer + 1) % self.sliding_window_pattern else None


def _check_layers(config: Config, other_pattern: object) -> None:
    """The oracle reads the pattern alone; the other ways of saying the same must agree with it."""
    if min(config.sliding_window_pattern, config.sliding_window) < 1:
        raise ConfigError(
            "gemma3_text needs a window and a pattern of at least 1",
            sliding_window=config.sliding_window,
            sliding_window_pattern=config.sliding_window_pattern,
            next_step="mend config.json",
        )
    windows = map(config.window, range(config.num_hidden_layers))
    kinds = tuple("full_attention" if window is None else "sliding_attention" for window in windows)
    if config.layer_types not in (None, kinds) or other_pattern not in (None, config.sliding_window_pattern):
        raise ConfigError(
            "the layers of config.json contradict sliding_window_pattern, which alone the oracle reads",
            sliding_window_pattern=config.sliding_window_pattern,
            _sliding_window_pattern=other_pattern,
            layer_types="absent" if config.layer_types is None else ", ".join(config.layer_types),
            next_step="mend config.json",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Grouped-query self-attention with normalised queries and keys."""

    path: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    rope: Rope
    window: int | None
    config: Config

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, window: int | None) -> "Attention":
        """Take the four projections and the two norms from the checkpoint."""
        D, E, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        H, K = config.num_attention_heads, config.num_key_value_heads
        if window is None:
            rope = make_rope(E, base=config.rope_theta, scaling=config.rope_scaling)
        else:
            rope = make_rope(E, base=config.rope_local_base_freq)
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.q_proj", inputs=D, outputs=H * E),
            k=Linear.take(checkpoint, f"{path}.k_proj", inputs=D, outputs=K * E),
            v=Linear.take(checkpoint, f"{path}.v_proj", inputs=D, outputs=K * E),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=H * E, outputs=D),
            q_norm=RMSNorm.take(checkpoint, f"{path}.q_norm", width=E, eps=eps, plus_one=True),
            k_norm=RMSNorm.take(checkpoint, f"{path}.k_norm", width=E, eps=eps, plus_one=True),
            rope=rope,
            window=window,
            config=config,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to the window or to everything before; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        q_BHLE, k_BKLE, v_BKLE = (
            projection(x_BLD).reshape(B, L, -1, self.config.head_dim).swapaxes(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mask = cache.mask(L, window=self.window)
        q_BHLE = self.rope(self.q_norm(q_BHLE), positions(cache))
        k_BKLE = self.rope(self.k_norm(k_BKLE), positions(cache))
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        out_BHLE = attend(q_BHLE, keys, values, scale=self.config.query_pre_attn_scalar**-0.5, mask=mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache


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
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, window: int | None) -> "Block":
        """Take one layer from the checkpoint."""
        D = config.hidden_size

        def norm(name: str) -> RMSNorm:
            return RMSNorm.take(checkpoint, f"{path}.{name}", width=D, eps=config.rms_norm_eps, plus_one=True)

        return cls(
            path=path,
            input_norm=norm("input_layernorm"),
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, window),
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
        h_BLD = residual_sum(x_BLD, self.attention_norm(attended))
        return tap(self.path, residual_sum(h_BLD, self.mlp_norm(self.mlp(self.mlp_input_norm(h_BLD))))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, blocks, final norm, head (None where it is the embedding)."""

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
        untied = config.tie_word_embeddings is False or "lm_head.weight" in checkpoint
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, config.window(i))
                for i in range(config.num_hidden_layers)
            ),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps, plus_one=True),
            head=Linear.take(checkpoint, "lm_head", inputs=D, outputs=V) if untied else None,
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
        """Keys and values may be packed, in rings too."""
        return None

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        windows = (block.attention.window for block in self.blocks)
        return tuple(PlainCache() if window is None else RotatingCache(max_size=window) for window in windows)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches.

        Numerics: the embedding's factor sqrt(D) is rounded to bfloat16, whatever the model computes in.
        """
        x_BLD = self.embedding(ids_BL)
        x_BLD = x_BLD * mx.array(self.config.hidden_size**0.5, mx.bfloat16).astype(x_BLD.dtype)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, as_kv(cache))
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)


def residual_sum(x_BLD: mx.array, y_BLD: mx.array) -> mx.array:
    """x + y; in float16 held inside its finite range, which this family's residual stream leaves."""
    if x_BLD.dtype != mx.float16:
        return x_BLD + y_BLD
    bound = mx.finfo(mx.float16).max
    total = x_BLD.astype(mx.float32) + y_BLD.astype(mx.float32)
    return mx.clip(total, -bound, bound).astype(mx.float16)
