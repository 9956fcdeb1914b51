"""qwen3_next: three layers of gated delta rule to one of gated attention, each followed by experts beside a shared one.

Layer i attends to all positions if (i + 1) is a multiple of `full_attention_interval`; the others keep a convolution's
window and a matrix a head. One projection gives queries, keys, values and gates of the linear layers, key head by key head.

Source: spec/models.md section 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, as_kv
from engine.cache.recurrent import RecurrentCache, as_recurrent
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_experts, check_fixed, check_full_attention, check_heads
from engine.errors import ConfigError
from engine.gated_attention import GatedAttention
from engine.gated_delta import STATE_SLOTS, DeltaHeads, GatedDeltaMixer
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.shared_expert_moe import ExpertSizes, SharedExpertMoE
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"hidden_act": "silu", "use_sliding_window": False}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "output_router_logits": "asks for another output in training",
    "router_aux_loss_coef": "used in training",
}
DROPPED: Final[Mapping[str, str]] = {r"mtp\..*": "a head that predicts several tokens ahead, which no oracle here has"}
TIED: Final[Mapping[str, str]] = {r"lm_head\..*": "a copy of the embedding, to which the head is tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a qwen3_next; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    vocab_size: int
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, or heads, experts or layers that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            rotated=config.rotated,
        )
        config.delta_heads.check()
        check_full_attention(
            layers=config.num_hidden_layers, interval=config.full_attention_interval, layer_types=config.layer_types
        )
        if config.decoder_sparse_step < 1:
            raise ConfigError(
                "decoder_sparse_step counts layers",
                decoder_sparse_step=config.decoder_sparse_step,
                next_step="mend config.json",
            )
        if any(config.has_experts(layer) for layer in range(config.num_hidden_layers)):
            check_experts(experts=config.num_experts, chosen=config.num_experts_per_tok)
        return config

    @property
    def rotated(self) -> int:
        """Elements of a head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

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

    @property
    def expert_sizes(self) -> ExpertSizes:
        """Sizes of the layers of experts."""
        return ExpertSizes(
            experts=self.num_experts,
            chosen=self.num_experts_per_tok,
            inner=self.moe_intermediate_size,
            shared_inner=self.shared_expert_intermediate_size,
            normalised=self.norm_topk_prob,
        )

    def is_linear(self, layer: int) -> bool:
        """Whether a layer runs the delta rule rather than attention."""
        return (layer + 1) % self.full_attention_interval != 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts rather than one dense feed-forward."""
        due = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return due and layer not in self.mlp_only_layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearAttention:
    """The delta rule's mixer behind two projections, whose outputs are grouped by key head."""

    qkvz: Linear
    ba: Linear
    mixer: GatedDeltaMixer

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, *, hub: bool) -> "LinearAttention":
        """Take projections and mixer from the checkpoint."""
        D, heads = config.hidden_size, config.delta_heads
        qkvz_width = heads.channels + heads.values
        return cls(
            qkvz=Linear.take(checkpoint, f"{path}.in_proj_qkvz", inputs=D, outputs=qkvz_width),
            ba=Linear.take(checkpoint, f"{path}.in_proj_ba", inputs=D, outputs=2 * heads.value_heads),
            mixer=GatedDeltaMixer.take(
                checkpoint, path, heads=heads, width=D, eps=config.rms_norm_eps, channels_first=hub
            ),
        )

    def __call__(self, x_BLD: mx.array, cache: RecurrentCache) -> tuple[mx.array, RecurrentCache]:
        """Mix [B, L, D] with what the cache remembers; returns [B, L, D] and the new cache."""
        B, L, _ = x_BLD.shape
        heads = self.mixer.heads
        group = heads.value_heads // heads.key_heads
        E, V = heads.key_width, heads.value_width
        qkvz_BLKC = self.qkvz(x_BLD).reshape(B, L, heads.key_heads, -1)
        ba_BLKC = self.ba(x_BLD).reshape(B, L, heads.key_heads, -1)
        *qkv, z_BLKC = mx.split(qkvz_BLKC, [E, 2 * E, 2 * E + group * V], axis=-1)
        qkv_BLC = mx.concatenate([part.reshape(B, L, -1) for part in qkv], axis=-1)
        b_BLH, a_BLH = (part.reshape(B, L, -1) for part in mx.split(ba_BLKC, 2, axis=-1))
        return self.mixer(qkv_BLC, z_BLKC.reshape(B, L, heads.value_heads, V), b_BLH, a_BLH, cache)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: GatedAttention | LinearAttention
    post_norm: RMSNorm
    mlp: SharedExpertMoE | GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, rope: Rope, *, hub: bool) -> "Block":
        """Take one layer from the checkpoint."""
        path, D, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps, stored_less_one=hub),
            attention=LinearAttention.take(checkpoint, f"{path}.linear_attn", config, hub=hub)
            if config.is_linear(layer)
            else GatedAttention.take(
                checkpoint,
                f"{path}.self_attn",
                width=D,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_width=config.head_dim,
                bias=config.attention_bias,
                eps=eps,
                rope=rope,
                norms_less_one=hub,
            ),
            post_norm=RMSNorm.take(
                checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps, stored_less_one=hub
            ),
            mlp=SharedExpertMoE.take(
                checkpoint,
                f"{path}.mlp",
                width=D,
                sizes=config.expert_sizes,
                apart=lambda expert, name: f"{path}.mlp.experts.{expert}.{name}",
            )
            if config.has_experts(layer)
            else GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
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

        Numbered experts mark a checkpoint as the hub's: norms are stored less one there, and filters [C, 1, K].

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        config = Config.read(raw)
        D, V = config.hidden_size, config.vocab_size
        hub = any(
            f"model.layers.{i}.mlp.experts.0.up_proj.weight" in checkpoint for i in range(config.num_hidden_layers)
        )
        rope = make_rope(config.rotated, base=config.rope_theta, scaling=config.rope_scaling)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(Block.take(checkpoint, i, config, rope, hub=hub) for i in range(config.num_hidden_layers)),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps, stored_less_one=hub),
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
        return self.config.head_dim

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
        return tap("model", self.norm(x_BLD)), tuple(after)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)
