"""mamba2: blocks of a norm and a state-space layer, nothing else; no attention, no keys and values.

The head is tied to the embedding or not. The norm before each layer has an epsilon of its own that config.json does not
reach: the oracle's.

Source: Dao and Gu 2024; engine/state_space_mixer.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.protocol import Cache
from engine.cache.recurrent import RecurrentCache, as_recurrent
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed
from engine.linear import Embedding, Linear
from engine.norm import RMSNorm
from engine.state_space import read_limits
from engine.state_space_mixer import STATE_SLOTS, OutputNorm, ScanHeads, StateSpaceMixer
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {"hidden_act": "silu", "rms_norm": True}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "chunk_size": "how another library cuts the scan; the oracle cuts it at 256",
    "expand": "num_heads * head_dim says the same",
    "intermediate_size": "num_heads * head_dim says the same",
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "norm_before_gate": "the gate comes first whatever it says, in the oracle too",
    "rescale_prenorm_residual": "used in training",
    "residual_in_fp32": "the oracle's residual stays in the computing dtype",
    **dict.fromkeys(("time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min"), "used in training"),
    "time_step_rank": "of an earlier version of the layer",
    "time_step_scale": "used in training",
}
DROPPED: Final[Mapping[str, str]] = {}
BLOCK_EPS: Final = 1e-5  # of the norms before the layers, whatever layer_norm_epsilon is


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a mamba2; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int
    layer_norm_epsilon: float
    vocab_size: int
    use_bias: bool
    use_conv_bias: bool
    tie_word_embeddings: bool
    time_step_limit: tuple[float, ...]
    ssm_state_size: int | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, another activation or norm, limits that are no pair, or heads that do not
                fit.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        config.heads.check()
        read_limits(config.time_step_limit)
        return config

    @property
    def heads(self) -> ScanHeads:
        """Sizes of the scan."""
        return ScanHeads(
            heads=self.num_heads,
            head_width=self.head_dim,
            groups=self.n_groups,
            state_width=self.ssm_state_size or self.state_size,
            kernel=self.conv_kernel,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """mixer(norm(x)) + x."""

    path: str
    norm: RMSNorm
    mixer: StateSpaceMixer

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config) -> "Block":
        """Take one layer from the checkpoint."""
        return cls(
            path=path,
            norm=RMSNorm.take(checkpoint, f"{path}.norm", width=config.hidden_size, eps=BLOCK_EPS),
            mixer=StateSpaceMixer.take(
                checkpoint,
                f"{path}.mixer",
                heads=config.heads,
                width=config.hidden_size,
                limits=read_limits(config.time_step_limit),
                norm=OutputNorm.take(
                    checkpoint, f"{path}.mixer.norm", width=config.heads.inner, eps=config.layer_norm_epsilon
                ),
                in_bias=config.use_bias,
                conv_bias=config.use_conv_bias,
                out_bias=config.use_bias,
            ),
        )

    def __call__(self, x_BLD: mx.array, cache: RecurrentCache) -> tuple[mx.array, RecurrentCache]:
        """One layer."""
        mixed, cache = self.mixer(self.norm(x_BLD), cache)
        return tap(self.path, mixed + x_BLD), cache


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
            embedding=Embedding.take(checkpoint, "backbone.embeddings", vocabulary=V, width=D),
            blocks=tuple(
                Block.take(checkpoint, f"backbone.layers.{i}", config) for i in range(config.num_hidden_layers)
            ),
            norm=RMSNorm.take(checkpoint, "backbone.norm_f", width=D, eps=config.layer_norm_epsilon),
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
        """Elements of a head of the scan: there are no keys and values."""
        return self.config.head_dim

    @property
    def no_packed_kv(self) -> str | None:
        """There is nothing to pack."""
        return "mamba2 has no keys and values; the oracle ignores the option silently"

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        return tuple(RecurrentCache.empty(STATE_SLOTS) for _ in self.blocks)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, as_recurrent(cache))
            longer.append(new)
        return tap("backbone", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)
