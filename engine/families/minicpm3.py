"""minicpm3: latent attention whose keys and values are cached in full, between scaled residuals.

Queries and keys-with-values go through narrow normalised layers; a part of each key, common to all heads, and of each query
is turned (longrope). What is cached are the finished keys and values, so this is ordinary attention with keys wider than
values. The embedding, both branches of a block and the input of an untied head are scaled.

Source: spec/models.md section 8 (longrope); Hu et al. 2024 (MiniCPM); DeepSeek-AI 2024 (DeepSeek-V2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed
from engine.errors import ConfigError
from engine.latent_attention import LatentSizes, LowRankQueries, check_latent_sizes
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"hidden_act": "silu", "rope_traditional": False}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "auto_map": "code of another library",
    "num_key_value_heads": "every head has keys and values of its own",
}
DROPPED: Final[Mapping[str, str]] = {}
LATENT_EPS: Final = 1e-5  # of the norms inside attention, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a minicpm3; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    vocab_size: int
    rms_norm_eps: float
    dim_model_base: int
    scale_depth: float
    scale_emb: float
    max_position_embeddings: int
    rope_scaling: Mapping[str, Any]
    rope_theta: float = 1e6
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, another rope scaling than longrope, or sizes that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads")
        more = ("num_hidden_layers", "dim_model_base")
        check_latent_sizes(**{key: getattr(config, key) for key in (*names, *more)}, v_head_dim=config.value_width)
        form = config.rope_scaling.get("rope_type", config.rope_scaling.get("type"))
        if form != "longrope":
            raise ConfigError(
                "minicpm3 turns by longrope only", rope_scaling=form, next_step="mend rope_scaling in config.json"
            )
        return config

    @property
    def value_width(self) -> int:
        """Elements of a value."""
        return self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def sizes(self) -> LatentSizes:
        """Sizes of an attention layer."""
        return LatentSizes(
            width=self.hidden_size,
            heads=self.num_attention_heads,
            rank=self.kv_lora_rank,
            own=self.qk_nope_head_dim,
            shared=self.qk_rope_head_dim,
            value=self.value_width,
            eps=LATENT_EPS,
            bias=self.attention_bias,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Self-attention with keys and values through a latent that is not kept."""

    path: str
    queries: LowRankQueries
    down: Linear
    norm: RMSNorm
    up: Linear
    o: Linear
    rope: Rope
    sizes: LatentSizes

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Attention":
        """Take projections and norms from the checkpoint."""
        sizes = config.sizes
        D, H, C, bias = sizes.width, sizes.heads, sizes.rank, sizes.bias
        kv_width = H * (sizes.own + sizes.value)
        return cls(
            path=path,
            queries=LowRankQueries.take(checkpoint, path, sizes, rank=config.q_lora_rank),
            down=Linear.take(checkpoint, f"{path}.kv_a_proj_with_mqa", inputs=D, outputs=C + sizes.shared, bias=bias),
            norm=RMSNorm.take(checkpoint, f"{path}.kv_a_layernorm", width=C, eps=sizes.eps),
            up=Linear.take(checkpoint, f"{path}.kv_b_proj", inputs=C, outputs=kv_width),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=H * sizes.value, outputs=D, bias=bias),
            rope=rope,
            sizes=sizes,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        H, own = self.sizes.heads, self.sizes.own
        q_BHLE = self.queries(x_BLD).reshape(B, L, H, -1).swapaxes(1, 2)
        latent_BLC, shared_BLR = mx.split(self.down(x_BLD), [self.sizes.rank], axis=-1)
        kv_BHLJ = self.up(self.norm(latent_BLC)).reshape(B, L, H, -1).swapaxes(1, 2)
        k_BHLN, v_BHLV = mx.split(kv_BHLJ, [own], axis=-1)
        mask = cache.mask(L)
        turned_BHLR = self.rope(q_BHLE[..., own:], cache.offset)
        turned_B1LR = self.rope(mx.expand_dims(shared_BLR, 1), cache.offset)
        q_BHLE = mx.concatenate([q_BHLE[..., :own], turned_BHLR], axis=-1)
        k_BHLE = mx.concatenate([k_BHLN, mx.broadcast_to(turned_B1LR, turned_BHLR.shape)], axis=-1)
        cache, keys, values = cache.append(k_BHLE, v_BHLV)
        out_BHLV = attend(q_BHLE, keys, values, scale=self.sizes.key**-0.5, mask=mask)
        return tap(self.path, self.o(out_BHLV.swapaxes(1, 2).reshape(B, L, -1))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + s * attention(norm(x)), then x + s * mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: GatedMLP
    branch_scale: float

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        path, D, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=Attention.take(checkpoint, f"{path}.self_attn", config, rope),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
            branch_scale=config.scale_depth / config.num_hidden_layers**0.5,
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer.

        Numerics: the scale is a Python float, so in 16 bits it is rounded before it multiplies.
        """
        attended, cache = self.attention(self.input_norm(x_BLD), cache)
        h_BLD = x_BLD + attended * self.branch_scale
        return tap(self.path, h_BLD + self.mlp(self.post_norm(h_BLD)) * self.branch_scale), cache


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
            config.qk_rope_head_dim,
            base=config.rope_theta,
            scaling=config.rope_scaling,
            max_positions=config.max_position_embeddings,
        )
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(Block.take(checkpoint, i, config, rope) for i in range(config.num_hidden_layers)),
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
        """Elements that divide both a key and a value, which have different widths: what a packing group must divide."""
        return math.gcd(self.config.sizes.key, self.config.sizes.value)

    @property
    def no_packed_kv(self) -> str | None:
        """Keys and values may be packed."""
        return None

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        return tuple(PlainCache() for _ in self.blocks)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL) * self.config.scale_emb
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, as_kv(cache))
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states; only a head of its own has its input divided, as in the oracle."""
        if self.head is None:
            return self.embedding.as_head(hidden_BLD)
        return self.head(hidden_BLD / (self.config.hidden_size / self.config.dim_model_base))
