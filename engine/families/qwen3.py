"""qwen3: a dense decoder that norms queries and keys head by head before it rotates them.

Pre-norm blocks, grouped-query attention with rotary positions, SwiGLU, a head that may be tied to the embedding; no
biases. The same graph, read before the head, is the embedding model of the family (`engine.embedding_model`).

Source: spec/models.md section 2; Yang et al. 2025.
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
    "attention_bias": "this family has none; another value than false is refused below",
    "hidden_act": "always silu in this family; another value is refused below",
    "layer_types": "all layers see every position; another kind is refused below",
    "max_position_embeddings": "no rope form of this family reads it",
    "sliding_window": "read only together with use_sliding_window",
    "use_sliding_window": "the oracle has no windows here; another value than false is refused below",
}
TIED: Final[Mapping[str, str]] = {r"lm_head\.weight": "a copy of the embedding, to which the head is tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a qwen2; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    tie_word_embeddings: bool
    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, an activation other than silu, biases, windows, no or two rotations, or
                heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
            if raw.get(key, only) != only:
                raise ConfigError(
                    f"qwen3 does not compute {key} {raw[key]!r}", known=repr(only), next_step="mend config.json"
                )
        if kinds := set(raw.get("layer_types") or ()) - {"full_attention"}:
            raise ConfigError(
                "qwen3 has no such layers",
                layer_types=", ".join(sorted(map(str, kinds))),
                known="full_attention",
                next_step="mend config.json",
            )
        H, K, E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if min(H, K, E) < 1 or H % K or E % 2:
            raise ConfigError(
                "the heads of config.json do not fit together",
                num_attention_heads=H,
                num_key_value_heads=K,
                head_dim=E,
                next_step="mend config.json",
            )
        return config

    def rope(self) -> Rope:
        """The rotation, from `rope_theta` and `rope_scaling` or from `rope_parameters`, which may hold both.

        Raises:
            ConfigError: There is no base, or the two ways contradict each other.
        """
        nested = dict(self.rope_parameters or {})
        base = nested.pop("rope_theta", None)
        twice = [
            name
            for name, flat, inner in (
                ("rope_theta", self.rope_theta, base),
                ("rope_scaling", self.rope_scaling, nested),
            )
            if flat is not None and inner and flat != inner
        ]
        base = base if self.rope_theta is None else self.rope_theta
        if twice or not isinstance(base, int | float):
            raise ConfigError(
                f"rope_parameters and {twice[0]} contradict each other" if twice else "config.json has no rope_theta",
                rope_theta=self.rope_theta,
                rope_scaling=self.rope_scaling,
                rope_parameters=self.rope_parameters,
                next_step="mend config.json",
            )
        return make_rope(self.head_dim, base=base, scaling=self.rope_scaling or nested)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Grouped-query self-attention with normed queries and keys and rotary positions."""

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
        """Take the four projections and the two norms from the checkpoint."""
        D, E, H, K = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.q_proj", inputs=D, outputs=H * E),
            k=Linear.take(checkpoint, f"{path}.k_proj", inputs=D, outputs=K * E),
            v=Linear.take(checkpoint, f"{path}.v_proj", inputs=D, outputs=K * E),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=H * E, outputs=D),
            q_norm=RMSNorm.take(checkpoint, f"{path}.q_norm", width=E, eps=config.rms_norm_eps),
            k_norm=RMSNorm.take(checkpoint, f"{path}.k_norm", width=E, eps=config.rms_norm_eps),
            rope=rope,
            head_width=E,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        q_BLHE, k_BLKE, v_BLKE = (
            projection(x_BLD).reshape(B, L, -1, self.head_width) for projection in (self.q, self.k, self.v)
        )
        mask = cache.mask(L)
        q_BHLE = self.rope(self.q_norm(q_BLHE).swapaxes(1, 2), cache.offset)
        k_BKLE = self.rope(self.k_norm(k_BLKE).swapaxes(1, 2), cache.offset)
        cache, keys, values = cache.append(k_BKLE, v_BLKE.swapaxes(1, 2))
        out_BHLE = attend(q_BHLE, keys, values, scale=self.head_width**-0.5, mask=mask)
        return tap(self.path, self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: GatedMLP

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
        checkpoint.finish(dropped=TIED if config.tie_word_embeddings else {})
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
