"""gemma4_text: two kinds of layers with heads of their own widths, in three shapes that config.json chooses between.

Dense; with experts beside the dense feed-forward layer (`enable_moe_block`); with per-layer inputs and last layers that
read the keys and values of earlier ones (`hidden_size_per_layer_input`, `num_kv_shared_layers`). Queries, keys and values
are normalised a head at a time, scores are not scaled, a layer's output is multiplied by its scalar, logits are capped.

Source: spec/models.md section 5.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import geglu_approx, soft_capped
from engine.cache.protocol import Cache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.errors import ConfigError
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.parallel_experts import ParallelExperts
from engine.per_layer_input import PerLayerGate, PerLayerInputs
from engine.rope import Rope, make_rope
from engine.shared_kv_attention import FULL, SLIDING, SeenKV, SharedKVAttention, donors, unread
from engine.taps import tap

IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("global_partial_rotary_factor", "partial_rotary_factor"), "the oracle reads rope_parameters"),
    "max_position_embeddings": "nothing is computed from it",
}
ONLY: Final[Mapping[str, tuple[object, ...]]] = {  # keys with few values that this family computes
    "attention_bias": (False,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False, None, "vision"),  # text attends causally under each of these
}
DROPPED: Final[Mapping[str, str]] = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\..*": "computed from rope_parameters",
    r".*\.(input|output)_(max|min)": "ranges for quantised activations, which nothing here uses",
}
ROPE: Final[Mapping[str, Mapping[str, Any]]] = {  # where config.json has no rope_parameters
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a gemma4_text; field names are its keys."""

    hidden_size: int = 1536
    num_hidden_layers: int = 35
    intermediate_size: int = 6144
    num_attention_heads: int = 8
    head_dim: int = 256
    global_head_dim: int | None = 512
    num_key_value_heads: int = 1
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    rms_norm_eps: float = 1e-6
    vocab_size: int = 262144
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    num_kv_shared_layers: int = 20
    use_double_wide_mlp: bool = True
    layer_types: tuple[str, ...] | None = None
    sliding_window: int = 512
    sliding_window_pattern: int = 5
    rope_traditional: bool = False
    rope_parameters: Mapping[str, Mapping[str, Any]] | None = None
    final_logit_softcapping: float | None = 30.0
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, a key of `ONLY` with another value, layers without a donor of keys and
                values, heads that do not fit, a table too small, or experts without numbers.
        """
        config = read_config(cls, raw, irrelevant={**IRRELEVANT, **dict.fromkeys(ONLY, "few values, checked below")})
        for key, values in ONLY.items():
            if raw.get(key, values[0]) not in values:
                raise _refused(f"does not compute this {key}", found=raw[key], known=", ".join(map(str, values)))
        N, W = config.num_hidden_layers, config.sliding_window
        if len(config.kinds) != N or not N or W < 1:
            raise _refused(
                "needs layers and a window", layer_types=", ".join(config.kinds), num_hidden_layers=N, sliding_window=W
            )
        donors(config.kinds, shared=config.num_kv_shared_layers)
        for kind in sorted(set(config.kinds)):
            H, K = config.num_attention_heads, config.kv_heads(kind)
            if K < 1 or H % K:
                raise _refused("needs heads that fit together", layers=kind, num_attention_heads=H, key_value_heads=K)
        V, rows = config.vocab_size, config.vocab_size_per_layer_input
        if config.hidden_size_per_layer_input and rows < V:
            raise _refused("needs per-layer inputs for every id", vocab_size=V, vocab_size_per_layer_input=rows)
        X, k, F = config.num_experts or 0, config.top_k_experts or 0, config.moe_intermediate_size or 0
        if config.enable_moe_block and (F < 1 or not 0 < k <= X):
            raise _refused("needs numbers of experts", num_experts=X, top_k_experts=k, moe_intermediate_size=F)
        return config

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer."""
        if self.layer_types is not None:
            return self.layer_types
        pattern = max(self.sliding_window_pattern, 1)
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(self.num_hidden_layers))

    @property
    def own_layers(self) -> int:
        """Layers, from the first, that have keys and values of their own."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def head_width(self, kind: str) -> int:
        """Elements of a head in layers of a kind."""
        return (self.global_head_dim or self.head_dim) if kind == FULL else self.head_dim

    def keys_as_values(self, kind: str) -> bool:
        """Whether layers of a kind have no projection for values."""
        return self.attention_k_eq_v and kind == FULL

    def kv_heads(self, kind: str) -> int:
        """Heads of keys and values in layers of a kind."""
        own = self.num_global_key_value_heads if self.keys_as_values(kind) else None
        return self.num_key_value_heads if own is None else own

    def rope(self, kind: str) -> Rope:
        """The rotation of layers of a kind; a ConfigError where the form cannot turn the asked part of the head."""
        entry = dict((self.rope_parameters or ROPE).get(kind, {}))
        base = entry.pop("rope_theta", 10_000.0)
        if entry.get("rope_type", "default") == "default" and entry.pop("partial_rotary_factor", 1.0) != 1.0:
            raise _refused("turns a part of the head only where rope_type is proportional", layers=kind)
        return make_rope(self.head_width(kind), base=base, traditional=self.rope_traditional, scaling=entry)


def _refused(what: str, **facts: object) -> ConfigError:
    return ConfigError(f"gemma4_text {what}", **facts, next_step="mend config.json")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Attention, feed-forward layer, per-layer input: each between norms and added; then the layer's scalar."""

    path: str
    input_norm: RMSNorm
    attention: SharedKVAttention
    attention_norm: RMSNorm
    mlp_input_norm: RMSNorm
    mlp: GatedMLP
    experts: ParallelExperts | None
    mlp_norm: RMSNorm
    gate: PerLayerGate | None
    scalar: mx.array

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        path = f"model.layers.{layer}"
        D, P, eps = config.hidden_size, config.hidden_size_per_layer_input, config.rms_norm_eps
        kind, has_own = config.kinds[layer], layer < config.own_layers
        F = config.intermediate_size * (2 if config.use_double_wide_mlp and not has_own else 1)

        def norm(name: str) -> RMSNorm:
            return RMSNorm.take(checkpoint, f"{path}.{name}", width=D, eps=eps)

        attention = SharedKVAttention.take(
            checkpoint,
            f"{path}.self_attn",
            width=D,
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads(kind),
            head_width=config.head_width(kind),
            eps=eps,
            rope=rope,
            window=config.sliding_window if kind == SLIDING else None,
            has_own=has_own,
            keys_as_values=config.keys_as_values(kind),
        )
        experts = None
        if config.enable_moe_block:
            X, k, inner = config.num_experts or 0, config.top_k_experts or 0, config.moe_intermediate_size or 0
            experts = ParallelExperts.take(checkpoint, path, experts=X, chosen=k, width=D, inner=inner, eps=eps)
        return cls(
            path=path,
            input_norm=norm("input_layernorm"),
            attention=attention,
            attention_norm=norm("post_attention_layernorm"),
            mlp_input_norm=norm("pre_feedforward_layernorm"),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=F, activation=geglu_approx),
            experts=experts,
            mlp_norm=norm("post_feedforward_layernorm"),
            gate=PerLayerGate.take(checkpoint, path, inner=P, width=D, eps=eps) if P else None,
            scalar=checkpoint.take(f"{path}.layer_scalar", (1,)),
        )

    def __call__(
        self, x_BLD: mx.array, cache: Cache | None, donated: SeenKV | None, input_BLP: mx.array | None
    ) -> tuple[mx.array, Cache | None, SeenKV]:
        """One layer; returns its output, the longer cache if it has one, and the keys and values that it saw."""
        attended, cache, seen = self.attention(self.input_norm(x_BLD), cache, donated)
        h_BLD = x_BLD + self.attention_norm(attended)
        fed_BLD = self.mlp(self.mlp_input_norm(h_BLD))
        if self.experts is not None:
            fed_BLD = self.experts(h_BLD, fed_BLD)
        h_BLD = h_BLD + self.mlp_norm(fed_BLD)
        if self.gate is not None and input_BLP is not None:
            h_BLD = h_BLD + self.gate(h_BLD, input_BLP)
        return tap(self.path, h_BLD * self.scalar), cache, seen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, per-layer inputs where there are any, blocks, final norm, head (None where it is tied)."""

    config: Config
    donors: tuple[int, ...]
    embedding: Embedding
    inputs: PerLayerInputs | None
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
        D, V, N, eps = config.hidden_size, config.vocab_size, config.num_hidden_layers, config.rms_norm_eps
        inputs = None
        if P := config.hidden_size_per_layer_input:
            rows = config.vocab_size_per_layer_input
            inputs = PerLayerInputs.take(checkpoint, "model", vocabulary=rows, layers=N, inner=P, width=D, eps=eps)
        ropes = {kind: config.rope(kind) for kind in config.kinds}
        model = cls(
            config=config,
            donors=donors(config.kinds, shared=config.num_kv_shared_layers),
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            inputs=inputs,
            blocks=tuple(Block.take(checkpoint, i, config, ropes[kind]) for i, kind in enumerate(config.kinds)),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=eps),
            head=None if config.tie_word_embeddings else Linear.take(checkpoint, "lm_head", inputs=D, outputs=V),
        )
        checkpoint.finish(dropped={**DROPPED, **unread("model.layers", own=config.own_layers, total=N)})
        return model

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: ids are below it."""
        return self.config.vocab_size

    @property
    def head_width(self) -> int:
        """What a group of packed elements must divide: the common divisor of the layers' head widths."""
        return math.gcd(*(self.config.head_width(kind) for kind in self.config.kinds))

    @property
    def no_packed_kv(self) -> str | None:
        """Keys and values may be packed; layers without their own read the packed ones of earlier layers."""
        return None

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one for each layer with keys and values of its own."""
        made = (block.attention.make_cache() for block in self.blocks)
        return tuple(cache for cache in made if cache is not None)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches.

        Numerics: the embedding's factor sqrt(D) is rounded to its dtype.
        """
        x_BLD = self.embedding(ids_BL) * self.config.hidden_size**0.5
        inputs = (None,) * len(self.blocks) if self.inputs is None else self.inputs(ids_BL, x_BLD)
        seen: list[SeenKV] = []
        longer: list[Cache] = []
        for i, (block, donor, input_BLP) in enumerate(zip(self.blocks, self.donors, inputs, strict=True)):
            own, donated = (caches[i], None) if donor == i else (None, seen[donor])
            x_BLD, new, kv = block(x_BLD, own, donated, input_BLP)
            seen.append(kv)
            longer += [] if new is None else [new]
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states, capped where the config says so."""
        logits_BLV = self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)
        cap = self.config.final_logit_softcapping
        return logits_BLV if cap is None else soft_capped(logits_BLV, cap)
