"""glm4_moe: experts chosen by biased sigmoids beside shared ones, after some dense layers.

Part of each head rotates; queries and keys may be normalised head by head; the head is never tied to the embedding. The
layer that hub snapshots have after the last one, which predicts several tokens ahead, is dropped.

Source: spec/models.md section 7 (router); GLM-4.5 team 2025.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.router import Choice, RoutedMLP
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {
    "hidden_act": "silu",
    "rope_scaling": None,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "num_nextn_predict_layers": "counts layers that are dropped",
}
AHEAD: Final = "predicts several tokens ahead, which the oracle drops"  # the layer after the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a glm4_moe; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    use_qk_norm: bool
    partial_rotary_factor: float
    rope_theta: float
    n_routed_experts: int | None
    n_shared_experts: int | None
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    vocab_size: int

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, or heads or experts that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            rotated=config.rotated,
        )
        if config.n_routed_experts is not None:
            keys = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
            config.choice(config.n_routed_experts).check({key: raw[key] for key in keys})
        return config

    @property
    def rotated(self) -> int:
        """Elements of a head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    def choice(self, experts: int) -> Choice:
        """The router's numbers, of so many experts."""
        return Choice(
            experts=experts,
            chosen=self.num_experts_per_tok,
            groups=self.n_group,
            kept=self.topk_group,
            normalised=self.norm_topk_prob,
            factor=self.routed_scaling_factor,
        )


def take_mlp(checkpoint: Checkpoint, path: str, config: Config, layer: int) -> RoutedMLP | GatedMLP:
    """A layer's feed-forward part: dense in the first layers, experts in the others."""
    if config.n_routed_experts is None or layer < config.first_k_dense_replace:
        return GatedMLP.take(checkpoint, path, width=config.hidden_size, inner=config.intermediate_size)
    return RoutedMLP.take(
        checkpoint,
        path,
        width=config.hidden_size,
        inner=config.moe_intermediate_size,
        shared_inner=config.moe_intermediate_size * (config.n_shared_experts or 0),
        choice=config.choice(config.n_routed_experts),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: GroupedAttention
    post_norm: RMSNorm
    mlp: RoutedMLP | GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        path, D, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=GroupedAttention.take(
                checkpoint,
                f"{path}.self_attn",
                width=D,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_width=config.head_dim,
                bias=config.attention_bias,
                scale=config.head_dim**-0.5,
                rope=rope,
                out_bias=False,
                norm_eps=eps if config.use_qk_norm else None,
            ),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=take_mlp(checkpoint, f"{path}.mlp", config, layer),
        )

    def __call__(self, x_BLD: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One layer."""
        attended, cache = self.attention(self.input_norm(x_BLD), cache)
        h_BLD = x_BLD + attended
        return tap(self.path, h_BLD + self.mlp(self.post_norm(h_BLD))), cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, blocks, final norm, head."""

    config: Config
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear

    @classmethod
    def build(cls, raw: Mapping[str, Any], checkpoint: Checkpoint) -> "Model":
        """Build from config.json and its checkpoint, using every tensor once.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        config = Config.read(raw)
        D, V = config.hidden_size, config.vocab_size
        rope = make_rope(config.rotated, base=config.rope_theta)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(Block.take(checkpoint, i, config, rope) for i in range(config.num_hidden_layers)),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps),
            head=Linear.take(checkpoint, "lm_head", inputs=D, outputs=V),
        )
        checkpoint.finish(dropped={rf"model\.layers\.{config.num_hidden_layers}\..*": AHEAD})
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
        return self.head(hidden_BLD)
