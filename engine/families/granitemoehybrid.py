"""granitemoehybrid: state-space layers with attention in between, and experts beside a common expert after each.

Pre-norm blocks. The embedding, what each layer adds, the scores of attention and the logits have multipliers of their own.
Attention rotates or has no positions at all. A config without experts has one dense feed-forward layer a block instead; one
without state-space layers is a plain decoder.

Source: IBM 2025 (Granite 4.0); engine/state_space_mixer.py.
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
from engine.chosen_experts import ChosenExperts
from engine.config import read_config
from engine.config_checks import check_experts, check_fixed, check_heads
from engine.errors import ConfigError
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.mlp import FusedGatedMLP, GatedMLP
from engine.moe import GatedExperts
from engine.norm import RMSNorm
from engine.rope import make_rope
from engine.rope_entry import unscaled_theta
from engine.state_space import read_limits
from engine.state_space_mixer import STATE_SLOTS, OutputNorm, ScanHeads, StateSpaceMixer
from engine.taps import tap

KINDS: Final = ("mamba", "attention")
POSITIONS: Final = ("rope", "nope")
FIXED: Final[Mapping[str, object]] = {
    "hidden_act": "silu",
    "normalization_function": "rmsnorm",
    "rope_scaling": None,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "mamba_chunk_size": "how another library cuts the scan; the oracle cuts it at 256",
    "mamba_expand": "mamba_n_heads * mamba_d_head says the same",
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "output_router_logits": "asks for another output in training",
    **dict.fromkeys(("init_method", "router_aux_loss_coef"), "used in training"),
}
DROPPED: Final[Mapping[str, str]] = {}
TIED: Final[Mapping[str, str]] = {r"lm_head\.weight": "a copy of the embedding, to which the head is tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a granitemoehybrid; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    vocab_size: int
    layer_types: tuple[str, ...]
    attention_bias: bool
    attention_multiplier: float
    embedding_multiplier: float
    logits_scaling: float
    residual_multiplier: float
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    shared_intermediate_size: int | None = None
    mamba_n_heads: int | None = None
    mamba_d_head: int | None = None
    mamba_d_state: int | None = None
    mamba_d_conv: int | None = None
    mamba_n_groups: int | None = None
    mamba_proj_bias: bool | None = None
    mamba_conv_bias: bool | None = None
    mlp_bias: bool = False
    position_embedding_type: str = "rope"
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = True
    time_step_limit: tuple[float, ...] = (0.001, 100.0)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, layers that are not all named, another form of positions, or heads or
                experts that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        kinds = set(config.layer_types)
        if len(config.layer_types) != config.num_hidden_layers or not kinds <= set(KINDS):
            raise ConfigError(
                "layer_types does not name every layer",
                layer_types=", ".join(config.layer_types) or "none",
                num_hidden_layers=config.num_hidden_layers,
                known=", ".join(KINDS),
                next_step="mend config.json",
            )
        if config.position_embedding_type not in POSITIONS:
            raise ConfigError(
                "granitemoehybrid has no such positions",
                position_embedding_type=config.position_embedding_type,
                known=", ".join(POSITIONS),
                next_step="mend config.json",
            )
        check_heads(heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_width=config.head_width)
        if config.num_local_experts:
            check_experts(experts=config.num_local_experts, chosen=config.num_experts_per_tok or 0)
        if "mamba" in kinds:
            config.scan_heads.check()
            read_limits(config.time_step_limit)
        return config

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def scan_heads(self) -> ScanHeads:
        """Sizes of the scan; zeros where config.json has none."""
        return ScanHeads(
            heads=self.mamba_n_heads or 0,
            head_width=self.mamba_d_head or 0,
            groups=self.mamba_n_groups or 0,
            state_width=self.mamba_d_state or 0,
            kernel=self.mamba_d_conv or 0,
        )


def take_attention(checkpoint: Checkpoint, path: str, config: Config) -> GroupedAttention:
    """Take a layer of attention from the checkpoint."""
    rotates = config.position_embedding_type == "rope"
    theta = unscaled_theta(config.rope_parameters, otherwise=config.rope_theta)
    return GroupedAttention.take(
        checkpoint,
        path,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_width=config.head_width,
        bias=config.attention_bias,
        scale=config.attention_multiplier,
        rope=make_rope(config.head_width, base=theta) if rotates else None,
    )


def take_mixer(checkpoint: Checkpoint, path: str, config: Config) -> StateSpaceMixer:
    """Take a state-space layer from the checkpoint."""
    heads, bias = config.scan_heads, bool(config.mamba_proj_bias)
    return StateSpaceMixer.take(
        checkpoint,
        path,
        heads=heads,
        width=config.hidden_size,
        limits=read_limits(config.time_step_limit),
        norm=OutputNorm.take(checkpoint, f"{path}.norm", width=heads.inner, eps=config.rms_norm_eps),
        in_bias=bias,
        conv_bias=bool(config.mamba_conv_bias),
        out_bias=bias,
    )


def take_experts(checkpoint: Checkpoint, path: str, config: Config) -> ChosenExperts:
    """Take router and experts from the checkpoint; on the hub gate and up are one tensor, gate first."""
    D, X, experts = config.hidden_size, config.num_local_experts or 0, f"{path}.switch_mlp"
    if f"{path}.input_linear.weight" in checkpoint:
        checkpoint.replace(
            [f"{path}.input_linear.weight", f"{path}.output_linear.weight"],
            [f"{experts}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")],
            lambda both_XGD, down_XDF: [*mx.split(both_XGD, 2, axis=1), down_XDF],
        )
    return ChosenExperts(
        path=path,
        router=Linear.take(checkpoint, f"{path}.router.layer", inputs=D, outputs=X),
        chosen=config.num_experts_per_tok or 0,
        experts=GatedExperts.take(
            checkpoint, experts, experts=X, width=D, inner=config.intermediate_size, activation=swiglu
        ),
    )


def take_shared(checkpoint: Checkpoint, path: str, config: Config) -> FusedGatedMLP:
    """Take the expert that every token goes through from the checkpoint."""
    D, F = config.hidden_size, config.shared_intermediate_size or 0
    return FusedGatedMLP(
        path=path,
        gate_up=Linear.take(checkpoint, f"{path}.input_linear", inputs=D, outputs=2 * F),
        down=Linear.take(checkpoint, f"{path}.output_linear", inputs=F, outputs=D),
        activation=swiglu,
    )


def take_dense(checkpoint: Checkpoint, path: str, config: Config) -> GatedMLP:
    """Take the feed-forward layer of a config without experts; on the hub it goes by the shared expert's name."""
    mlp, hub = f"{path}.mlp", f"{path}.shared_mlp"
    if f"{hub}.input_linear.weight" in checkpoint:
        checkpoint.replace(
            [f"{hub}.input_linear.weight", f"{hub}.output_linear.weight"],
            [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight", f"{mlp}.down_proj.weight"],
            lambda both_GD, down_DF: [*mx.split(both_GD, 2, axis=0), down_DF],
        )
    return GatedMLP.take(
        checkpoint, mlp, width=config.hidden_size, inner=config.intermediate_size, bias=config.mlp_bias
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + r * mixer(norm(x)), then x + r * (experts + shared expert)(norm(x)), or the dense layer in their place."""

    path: str
    input_norm: RMSNorm
    mixer: StateSpaceMixer | GroupedAttention
    post_norm: RMSNorm
    experts: ChosenExperts | None
    mlp: FusedGatedMLP | GatedMLP
    residual: float

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, kind: str) -> "Block":
        """Take one layer from the checkpoint."""
        D, eps, sparse = config.hidden_size, config.rms_norm_eps, bool(config.num_local_experts)
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            mixer=take_mixer(checkpoint, f"{path}.mamba", config)
            if kind == "mamba"
            else take_attention(checkpoint, f"{path}.self_attn", config),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            experts=take_experts(checkpoint, f"{path}.block_sparse_moe", config) if sparse else None,
            mlp=take_shared(checkpoint, f"{path}.shared_mlp", config)
            if sparse
            else take_dense(checkpoint, path, config),
            residual=config.residual_multiplier,
        )

    def __call__(self, x_BLD: mx.array, cache: Cache) -> tuple[mx.array, Cache]:
        """One layer."""
        new: Cache
        normed = self.input_norm(x_BLD)
        if isinstance(self.mixer, StateSpaceMixer):
            mixed, new = self.mixer(normed, as_recurrent(cache))
        else:
            mixed, new = self.mixer(normed, as_kv(cache))
        h_BLD = x_BLD + mixed * self.residual
        normed = self.post_norm(h_BLD)
        fed = self.mlp(normed) if self.experts is None else self.experts(normed) + self.mlp(normed)
        return tap(self.path, h_BLD + fed * self.residual), new


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
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, kind) for i, kind in enumerate(config.layer_types)
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
        kinds = self.config.layer_types
        return tuple(RecurrentCache.empty(STATE_SLOTS) if kind == "mamba" else PlainCache() for kind in kinds)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL) * self.config.embedding_multiplier
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, cache)
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states.

        Numerics: divided by logits_scaling in the computing dtype, not multiplied by its reciprocal.
        """
        logits_BLV = self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)
        return logits_BLV / self.config.logits_scaling
