"""falcon_h1: a state-space layer and attention side by side in every block, both on the same normed input.

The model was trained with multipliers on many of its products. A converted snapshot has them in its weights; a hub snapshot
has them in config.json, and its weights are multiplied here as the oracle does it, in the dtype of the file, before
anything is cast. Two things are the oracle's and not the paper's: `key_multiplier` reaches no weight, and
`attention_in_multiplier` reaches queries and keys but not values. The norm of the scan's output, where there is one, goes
over all groups together.

Source: Zuo et al. 2025 (Falcon-H1); engine/state_space_mixer.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import mlx.core as mx

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, as_kv
from engine.cache.recurrent import RecurrentCache, as_recurrent
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed, check_heads
from engine.errors import ConfigError
from engine.grouped_attention import GroupedAttention
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope, make_rope
from engine.state_space import Limits
from engine.state_space_mixer import STATE_SLOTS, OutputNorm, ScanHeads, StateSpaceMixer
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"hidden_act": "silu", "mamba_use_mlp": True}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "key_multiplier": "the oracle multiplies no weight by it",
    "mamba_chunk_size": "how another library cuts the scan; the oracle cuts it at 256",
    "mamba_expand": "mamba_d_ssm is read",
    "mlp_expansion_factor": "intermediate_size is read",
    "num_logits_to_keep": "the caller decides",
    **dict.fromkeys(("time_step_floor", "time_step_max", "time_step_min"), "used in training"),
    "time_step_rank": "of an earlier version of the layer",
}
DROPPED: Final[Mapping[str, str]] = {}
LIMITS: Final[Limits] = (0.0, math.inf)  # of the time steps, whatever config.json says


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a falcon_h1; field names are its keys, defaults those of the oracle."""

    hidden_size: int = 1024
    num_hidden_layers: int = 36
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-05
    vocab_size: int = 32784
    mamba_d_ssm: int = 1536
    mamba_n_heads: int = 24
    mamba_d_head: int = 64
    mamba_n_groups: int = 1
    mamba_d_state: int = 128
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    projectors_bias: bool = False
    rope_theta: float = 100000000000.0
    rope_traditional: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 131072
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 0.9375
    embedding_multiplier: float = 5.656854249492381
    lm_head_multiplier: float = 0.0390625
    mlp_multipliers: tuple[float, ...] = (0.8838834764831844, 0.5859375)
    ssm_in_multiplier: float = 1.25
    ssm_multipliers: tuple[float, ...] = (0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738)
    ssm_out_multiplier: float = 0.23570226039551587

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, another activation, no feed-forward layer, another number of
                multipliers, or heads that do not fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        check_heads(heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_width=config.head_dim)
        config.scan_heads.check()
        if config.scan_heads.inner != config.mamba_d_ssm:
            raise ConfigError(
                "the width of the scan is not that of its heads",
                mamba_d_ssm=config.mamba_d_ssm,
                mamba_n_heads=config.mamba_n_heads,
                mamba_d_head=config.mamba_d_head,
                next_step="mend config.json",
            )
        if (len(config.ssm_multipliers), len(config.mlp_multipliers)) != (5, 2):
            raise ConfigError(
                "config.json has another number of multipliers",
                ssm_multipliers=f"{len(config.ssm_multipliers)} of 5",
                mlp_multipliers=f"{len(config.mlp_multipliers)} of 2",
                next_step="mend config.json",
            )
        return config

    @property
    def scan_heads(self) -> ScanHeads:
        """Sizes of the scan."""
        return ScanHeads(
            heads=self.mamba_n_heads,
            head_width=self.mamba_d_head,
            groups=self.mamba_n_groups,
            state_width=self.mamba_d_state,
            kernel=self.mamba_d_conv,
        )


def multiply_weights(checkpoint: Checkpoint, config: Config) -> None:
    """Multiply the weights of a hub snapshot; those of a converted one stay as they are.

    A hub snapshot is known by the filters of its first block, [C, 1, K] where a converted one has [C, K, 1].

    Numerics: one product a weight, in the dtype of the file; the factors of the scan's projection, one a row, are themselves
        rounded to it before they meet.
    """
    filters = checkpoint.shape("model.layers.0.mamba.conv1d.weight")
    if filters is None or len(filters) != 3 or filters[2] <= filters[1]:
        return
    factors = {
        "model.embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "self_attn.q_proj": config.attention_in_multiplier,
        "self_attn.k_proj": config.attention_in_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "feed_forward.gate_proj": config.mlp_multipliers[0],
        "feed_forward.down_proj": config.mlp_multipliers[1],
    }

    sizes = config.scan_heads
    counts = (sizes.inner, sizes.inner, sizes.shared, sizes.shared, sizes.heads)
    rows = mx.concatenate([mx.full((n,), m) for n, m in zip(counts, config.ssm_multipliers, strict=True)])[:, None]

    def scaled(factor: float, weight: mx.array) -> list[mx.array]:
        return [weight * factor]

    def scaled_by_row(weight: mx.array) -> list[mx.array]:
        return [weight * (config.ssm_in_multiplier * rows.astype(weight.dtype))]

    for name in checkpoint.names:
        factor = next((value for path, value in factors.items() if name.endswith(f"{path}.weight")), None)
        if factor is not None:
            checkpoint.replace([name], [name], partial(scaled, factor))
        elif name.endswith("mamba.in_proj.weight"):
            checkpoint.replace([name], [name], scaled_by_row)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + scan(norm(x)) + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    mixer: StateSpaceMixer
    attention: GroupedAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        D, eps, heads = config.hidden_size, config.rms_norm_eps, config.scan_heads
        norm = None
        if config.mamba_rms_norm:
            gate_first = not config.mamba_norm_before_gate
            norm = OutputNorm.take(checkpoint, f"{path}.mamba.norm", width=heads.inner, eps=eps, gate_first=gate_first)
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            mixer=StateSpaceMixer.take(
                checkpoint,
                f"{path}.mamba",
                heads=heads,
                width=D,
                limits=LIMITS,
                norm=norm,
                in_bias=config.mamba_proj_bias,
                conv_bias=config.mamba_conv_bias,
                out_bias=config.projectors_bias,
            ),
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
            ),
            mlp_norm=RMSNorm.take(checkpoint, f"{path}.pre_ff_layernorm", width=D, eps=eps),
            mlp=GatedMLP.take(
                checkpoint, f"{path}.feed_forward", width=D, inner=config.intermediate_size, bias=config.mlp_bias
            ),
        )

    def __call__(self, x_BLD: mx.array, cache: Cache) -> tuple[mx.array, Cache]:
        """One layer; its cache is a group of the scan's state and the keys and values."""
        if not isinstance(cache, CacheGroup):
            raise TypeError(f"a block of falcon_h1 was handed a cache of kind {cache.kind}")
        state, keys_and_values = cache.members
        normed = self.input_norm(x_BLD)
        mixed, state = self.mixer(normed, as_recurrent(state))
        attended, keys_and_values = self.attention(normed, as_kv(keys_and_values))
        h_BLD = x_BLD + mixed + attended
        out_BLD = h_BLD + self.mlp(self.mlp_norm(h_BLD))
        return tap(self.path, out_BLD), cache.replaced(state, keys_and_values)


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
        multiply_weights(checkpoint, config)
        D, V = config.hidden_size, config.vocab_size
        rope = make_rope(
            config.head_dim,
            base=config.rope_theta,
            traditional=config.rope_traditional,
            scaling=config.rope_scaling,
            max_positions=config.max_position_embeddings,
        )
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"model.layers.{i}", config, rope) for i in range(config.num_hidden_layers)
            ),
            norm=RMSNorm.take(checkpoint, "model.final_layernorm", width=D, eps=config.rms_norm_eps),
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
        """Elements of a key or value head."""
        return self.config.head_dim

    @property
    def no_packed_kv(self) -> str | None:
        """The oracle converts no cache that stands in a group, without a word."""
        return "falcon_h1 keeps keys and values beside the scan's state, where the oracle ignores the option silently"

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, a group a layer."""
        return tuple(CacheGroup(members=(RecurrentCache.empty(STATE_SLOTS), PlainCache())) for _ in self.blocks)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, cache)
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states.

        Numerics: a tied head carries the embedding's multiplier, so its logits are multiplied by the quotient of both, one
            product; a head of its own carries its own.
        """
        if self.head is not None:
            return self.head(hidden_BLD)
        factor = self.config.lm_head_multiplier / self.config.embedding_multiplier
        return self.embedding.as_head(hidden_BLD) * factor
