"""nemotron_h: layers of one kind each, in the order that the config spells: scan, attention, feed-forward or experts.

Every layer is a norm and one mixer. Attention has no positions. Feed-forward layers and experts have no gate: their
activation is the square of what is above zero. Experts may work in a narrower space that all of them share. A layer without
memory has no cache, so there are fewer caches than layers.

Source: NVIDIA 2025 (Nemotron-H); engine/state_space_mixer.py, engine/router.py.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, as_kv
from engine.cache.recurrent import RecurrentCache, as_recurrent
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads
from engine.errors import ConfigError
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.norm import RMSNorm
from engine.router import Choice
from engine.state_space import read_limits
from engine.state_space_mixer import STATE_SLOTS, OutputNorm, ScanHeads, StateSpaceMixer
from engine.taps import tap
from engine.ungated_moe import UngatedMLP, UngatedMoE

KINDS: Final = "M*-E"  # scan, attention, feed-forward, experts
NAMES: Final[Mapping[str, str]] = {  # as lists spell them
    "attention": "*",
    "conv": "M",
    "full_attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "mlp": "-",
    "moe": "E",
}
FIXED: Final[Mapping[str, object]] = {
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "sliding_window": None,
    "tie_word_embeddings": False,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "auto_map": "code of another library",
    "chunk_size": "how another library cuts the scan; the oracle cuts it at 256",
    "expand": "mamba_num_heads * mamba_head_dim says the same",
    "mamba_ssm_cache_dtype": "the scan's matrices are float32 whatever it says, in the oracle too",
    **dict.fromkeys(("max_position_embeddings", "rope_theta"), "attention has no positions"),
    "num_logits_to_keep": "the caller decides",
    "rescale_prenorm_residual": "used in training",
    "residual_in_fp32": "the oracle's residual stays in the computing dtype",
    "rms_norm_eps": "layer_norm_epsilon is read, in the oracle too",
    **dict.fromkeys(("time_step_floor", "time_step_max", "time_step_min"), "used in training, unlike time_step_limit"),
    "time_step_rank": "of an earlier version of the layer",
    "use_bias": "mamba_proj_bias, attention_bias and mlp_bias are read, in the oracle too",
    "use_mamba_kernels": "how another library computes",
}
DROPPED: Final[Mapping[str, str]] = {r"mtp\..*": "layers that predict further tokens, which the oracle has not"}
ROUTED: Final = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")  # keys that must fit together
FLOOR: Final = 1e-20  # added to the sum of the chosen scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a nemotron_h; field names are its keys."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    layer_norm_epsilon: float
    vocab_size: int
    attention_bias: bool
    mlp_bias: bool
    mamba_proj_bias: bool
    use_conv_bias: bool
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int
    hybrid_override_pattern: str | tuple[str, ...] | None = None
    layers_block_type: tuple[str, ...] | None = None
    layer_types: tuple[str, ...] | None = None
    num_hidden_layers: int | None = None
    head_dim: int | None = None
    moe_intermediate_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_latent_size: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: float | None = None
    time_step_limit: tuple[float, ...] | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, another activation, layers that are not all named or of an unknown
                kind, or heads or experts that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        kinds = config.kinds
        if not kinds or set(kinds) - set(KINDS) or config.num_hidden_layers not in (None, len(kinds)):
            raise ConfigError(
                "config.json does not say what every layer is",
                hybrid_override_pattern=config.hybrid_override_pattern,
                layers_block_type=", ".join(config.layers_block_type or config.layer_types or ()) or "absent",
                num_hidden_layers=config.num_hidden_layers,
                known=f"a pattern of {', '.join(KINDS)}, or a list of {', '.join(NAMES)}",
                next_step="mend config.json",
            )
        check_heads(heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_width=config.head_width)
        config.scan_heads.check()
        read_limits(config.limits)
        if "E" in kinds:
            config.choice.check({key: raw.get(key) for key in ROUTED})
        return config

    @property
    def kinds(self) -> str:
        """A letter a layer; a name that is no kind stands as it is."""
        if self.hybrid_override_pattern is not None:
            return "".join(self.hybrid_override_pattern)
        return "".join(NAMES.get(name, "?") for name in self.layers_block_type or self.layer_types or ())

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def scan_heads(self) -> ScanHeads:
        """Sizes of the scan."""
        return ScanHeads(
            heads=self.mamba_num_heads,
            head_width=self.mamba_head_dim,
            groups=self.n_groups,
            state_width=self.ssm_state_size,
            kernel=self.conv_kernel,
        )

    @property
    def limits(self) -> tuple[float, ...]:
        """Bounds of the time steps; none where config.json has none."""
        return (0.0, math.inf) if self.time_step_limit is None else self.time_step_limit

    @property
    def choice(self) -> Choice:
        """Numbers of the router."""
        return Choice(
            experts=self.n_routed_experts or 0,
            chosen=self.num_experts_per_tok or 0,
            groups=self.n_group or 1,
            kept=self.topk_group or 1,
            normalised=bool(self.norm_topk_prob),
            factor=1.0 if self.routed_scaling_factor is None else self.routed_scaling_factor,
            floor=FLOOR,
        )


Mixer = StateSpaceMixer | GroupedAttention | UngatedMLP | UngatedMoE


def take_mixer(checkpoint: Checkpoint, path: str, config: Config, kind: str) -> Mixer:
    """Take the mixer of a layer of that kind from the checkpoint."""
    D = config.hidden_size
    if kind == "M":
        heads, eps = config.scan_heads, config.layer_norm_epsilon
        group = heads.inner // heads.groups
        return StateSpaceMixer.take(
            checkpoint,
            path,
            heads=heads,
            width=D,
            limits=read_limits(config.limits),
            norm=OutputNorm.take(checkpoint, f"{path}.norm", width=heads.inner, eps=eps, group=group),
            in_bias=config.mamba_proj_bias,
            conv_bias=config.use_conv_bias,
            out_bias=config.mamba_proj_bias,
        )
    if kind == "*":
        return GroupedAttention.take(
            checkpoint,
            path,
            width=D,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_width,
            bias=config.attention_bias,
            scale=config.head_width**-0.5,
            rope=None,
        )
    if kind == "-":
        return UngatedMLP.take(checkpoint, path, width=D, inner=config.intermediate_size, bias=config.mlp_bias)
    shared = config.moe_shared_expert_intermediate_size or config.intermediate_size
    return UngatedMoE.take(
        checkpoint,
        path,
        width=D,
        latent=config.moe_latent_size,
        inner=config.moe_intermediate_size or 0,
        shared_inner=None if config.n_shared_experts is None else shared,
        choice=config.choice,
        bias=config.mlp_bias,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + mixer(norm(x))."""

    path: str
    norm: RMSNorm
    mixer: Mixer

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, kind: str) -> "Block":
        """Take one layer from the checkpoint."""
        return cls(
            path=path,
            norm=RMSNorm.take(checkpoint, f"{path}.norm", width=config.hidden_size, eps=config.layer_norm_epsilon),
            mixer=take_mixer(checkpoint, f"{path}.mixer", config, kind),
        )

    def __call__(self, x_BLD: mx.array, caches: Iterator[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """One layer; it takes the next cache if it has a memory, and gives it back longer."""
        normed = self.norm(x_BLD)
        if isinstance(self.mixer, StateSpaceMixer):
            mixed, state = self.mixer(normed, as_recurrent(next(caches)))
            return tap(self.path, x_BLD + mixed), (state,)
        if isinstance(self.mixer, GroupedAttention):
            mixed, keys_and_values = self.mixer(normed, as_kv(next(caches)))
            return tap(self.path, x_BLD + mixed), (keys_and_values,)
        return tap(self.path, x_BLD + self.mixer(normed)), ()


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
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "backbone.embeddings", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"backbone.layers.{i}", config, kind) for i, kind in enumerate(config.kinds)
            ),
            norm=RMSNorm.take(checkpoint, "backbone.norm_f", width=D, eps=config.layer_norm_epsilon),
            head=Linear.take(checkpoint, "lm_head", inputs=D, outputs=V),
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
        """Empty caches, one for each layer that has a memory."""
        remember = (kind for kind in self.config.kinds if kind in "M*")
        return tuple(RecurrentCache.empty(STATE_SLOTS) if kind == "M" else PlainCache() for kind in remember)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        held = iter(caches)
        longer: list[Cache] = []
        for block in self.blocks:
            x_BLD, new = block(x_BLD, held)
            longer += new
        return tap("backbone", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.head(hidden_BLD)
