"""gemma3n: four copies of the stream that predict and correct each other, shared keys and values, per-layer inputs.

A layer works on the active copy: attention beside a low-rank residual (laurel), a feed-forward layer that may keep only the
largest of its gates, then the correction of all copies, to which the per-layer input is added except in the first. The last
layers read the keys and values of earlier ones; the projections of their own are in the checkpoint and not used. The text
model of config.json alone is computed.

Source: spec/models.md sections 0 and 5; Gemma Team 2025; engine.learned_residual.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import geglu_approx, soft_capped, sparse_geglu
from engine.cache.protocol import Cache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.errors import ConfigError
from engine.learned_residual import AltUp, Copies, Laurel
from engine.linear import Embedding
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.per_layer_input import PerLayerGate, PerLayerInputs
from engine.rope import Rope, make_rope
from engine.shared_kv_attention import FULL, SLIDING, SeenKV, SharedKVAttention, donors, unread
from engine.taps import tap

ROOT: Final = "model.language_model"
OUTER: Final[Mapping[str, str]] = {  # keys beside text_config
    **dict.fromkeys(
        ("audio_config", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id", "eoa_token_id"),
        "of the audio tower, which is not computed",
    ),
    **dict.fromkeys(
        ("boi_token_id", "eoi_token_id", "image_token_id", "vision_config", "vision_soft_tokens_per_image"),
        "of the vision tower, which is not computed",
    ),
    "tie_word_embeddings": "the head is the embedding, whatever this says: the checkpoint has no other",
}
IRRELEVANT: Final[Mapping[str, str]] = {
    "max_position_embeddings": "nothing is computed from it",
    "tie_word_embeddings": "as beside text_config",
}
ONLY: Final[Mapping[str, object]] = {  # keys with one value that this family computes
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_scaling": None,
}
DROPPED: Final[Mapping[str, str]] = {
    rf"model\.{tower}\..*": "images and sound are not computed"
    for tower in ("vision_tower", "audio_tower", "embed_audio", "embed_vision")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """config.json of a gemma3n."""

    text_config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """text_config of config.json; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int | tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    num_kv_shared_layers: int
    vocab_size_per_layer_input: int
    hidden_size_per_layer_input: int
    sliding_window: int
    rope_local_base_freq: float
    rope_theta: float
    final_logit_softcapping: float | None
    layer_types: tuple[str, ...]
    activation_sparsity_pattern: tuple[float, ...] | None
    altup_num_inputs: int
    altup_coef_clip: float | None
    altup_correct_scale: bool
    altup_active_idx: int
    laurel_rank: int

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type, a key of `ONLY` with another value, lists that do not name every layer,
                layers without a donor of keys and values, or numbers that do not fit together.
        """
        text = read_config(Outer, raw, irrelevant=OUTER).text_config
        only = dict.fromkeys(ONLY, "one value only, checked below")
        config = read_config(cls, text, irrelevant={**IRRELEVANT, **only})
        for key, value in ONLY.items():
            if text.get(key, value) != value:
                raise _refused(f"computes one {key} only", found=text[key], known=value)
        N, sparsities = config.num_hidden_layers, config.activation_sparsity_pattern
        inner = config.intermediate_size
        named = {
            "layer_types": len(config.layer_types),
            "intermediate_size": N if isinstance(inner, int) else len(inner),
            "activation_sparsity_pattern": N if sparsities is None else len(sparsities),
        }
        if set(named.values()) != {N}:
            raise _refused("needs lists that name every layer", num_hidden_layers=N, **named)
        if bad := [s for s in sparsities or () if not 0 <= s < 1]:
            raise _refused("needs sparsities from 0 to below 1", found=bad[0])
        donors(config.layer_types, shared=config.num_kv_shared_layers)
        own, W = config.layer_types[: config.own_layers], config.sliding_window
        if {FULL, SLIDING} - set(own) or W < 1:
            raise _refused("needs layers of both kinds, and a window", own_layers=", ".join(own), sliding_window=W)
        H, K, n = config.num_attention_heads, config.num_key_value_heads, config.altup_num_inputs
        if K < 1 or H % K or n < 2 or not 0 <= config.altup_active_idx < n:
            raise _refused(
                "needs heads and copies that fit together",
                num_attention_heads=H,
                num_key_value_heads=K,
                altup_num_inputs=n,
                altup_active_idx=config.altup_active_idx,
            )
        return config

    @property
    def own_layers(self) -> int:
        """Layers, from the first, that have keys and values of their own."""
        return self.num_hidden_layers - self.num_kv_shared_layers


def _refused(what: str, **facts: object) -> ConfigError:
    return ConfigError(f"gemma3n {what}", **facts, next_step="mend config.json")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Predict the copies, work on the active one, correct them all. The output is no tap: it is n copies, not one."""

    altup: AltUp
    scales_output: bool
    input_norm: RMSNorm
    laurel: Laurel
    attention: SharedKVAttention
    attention_norm: RMSNorm
    mlp_input_norm: RMSNorm
    mlp: GatedMLP
    mlp_norm: RMSNorm
    gate: PerLayerGate

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config, rope: Rope) -> "Block":
        """Take one layer from the checkpoint."""
        path = f"{ROOT}.layers.{layer}"
        D, P, eps = config.hidden_size, config.hidden_size_per_layer_input, config.rms_norm_eps
        F = config.intermediate_size if isinstance(config.intermediate_size, int) else config.intermediate_size[layer]
        sparsity = config.activation_sparsity_pattern[layer] if config.activation_sparsity_pattern else 0.0
        activation = sparse_geglu(sparsity) if sparsity else geglu_approx

        def norm(name: str) -> RMSNorm:
            return RMSNorm.take(checkpoint, f"{path}.{name}", width=D, eps=eps)

        return cls(
            altup=AltUp.take(
                checkpoint,
                f"{path}.altup",
                copies=config.altup_num_inputs,
                active=config.altup_active_idx,
                width=D,
                eps=eps,
                clip=config.altup_coef_clip,
            ),
            scales_output=config.altup_correct_scale,
            input_norm=norm("input_layernorm"),
            laurel=Laurel.take(checkpoint, f"{path}.laurel", width=D, rank=config.laurel_rank, eps=eps),
            attention=SharedKVAttention.take(
                checkpoint,
                f"{path}.self_attn",
                width=D,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_width=config.head_dim,
                eps=eps,
                rope=rope,
                window=config.sliding_window if config.layer_types[layer] == SLIDING else None,
                has_own=layer < config.own_layers,
            ),
            attention_norm=norm("post_attention_layernorm"),
            mlp_input_norm=norm("pre_feedforward_layernorm"),
            mlp=GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=F, activation=activation),
            mlp_norm=norm("post_feedforward_layernorm"),
            gate=PerLayerGate.take(checkpoint, path, inner=P, width=D, eps=eps),
        )

    def __call__(
        self, x_nBLD: mx.array, cache: Cache | None, donated: SeenKV | None, input_BLP: mx.array
    ) -> tuple[mx.array, Cache | None, SeenKV]:
        """One layer; returns the copies, the longer cache if it has one, and the keys and values that it saw."""
        predicted_nBLD = self.altup.predict(x_nBLD)
        active_BLD = predicted_nBLD[self.altup.active]
        normed_BLD = self.input_norm(active_BLD)
        laurel_BLD = self.laurel(normed_BLD)
        attended, cache, seen = self.attention(normed_BLD, cache, donated)
        h_BLD = (active_BLD + self.attention_norm(attended) + laurel_BLD) * 2.0**-0.5
        h_BLD = h_BLD + self.mlp_norm(self.mlp(self.mlp_input_norm(h_BLD)))
        corrected_nBLD = self.altup.correct(predicted_nBLD, h_BLD)
        first_BLD = corrected_nBLD[self.altup.active]
        if self.scales_output:
            first_BLD = first_BLD * self.altup.output_scale
        further_nBLD = corrected_nBLD[1:] + self.gate(first_BLD, input_BLP)
        return mx.concatenate([corrected_nBLD[:1], further_nBLD]), cache, seen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, per-layer inputs, copies, blocks, final norm; the embedding is the head."""

    config: Config
    donors: tuple[int, ...]
    embedding: Embedding
    inputs: PerLayerInputs
    copies: Copies
    blocks: tuple[Block, ...]
    norm: RMSNorm

    @classmethod
    def build(cls, raw: Mapping[str, Any], checkpoint: Checkpoint) -> "Model":
        """Build from config.json and its checkpoint, using every tensor once.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        config = Config.read(raw)
        D, N, eps = config.hidden_size, config.num_hidden_layers, config.rms_norm_eps
        P, V = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
        bases = {FULL: config.rope_theta, SLIDING: config.rope_local_base_freq}
        ropes = {kind: make_rope(config.head_dim, base=base) for kind, base in bases.items()}
        model = cls(
            config=config,
            donors=donors(config.layer_types, shared=config.num_kv_shared_layers),
            embedding=Embedding.take(checkpoint, f"{ROOT}.embed_tokens", vocabulary=config.vocab_size, width=D),
            inputs=PerLayerInputs.take(checkpoint, ROOT, vocabulary=V, layers=N, inner=P, width=D, eps=eps),
            copies=Copies.take(checkpoint, ROOT, copies=config.altup_num_inputs, width=D),
            blocks=tuple(Block.take(checkpoint, i, config, ropes[kind]) for i, kind in enumerate(config.layer_types)),
            norm=RMSNorm.take(checkpoint, f"{ROOT}.norm", width=D, eps=eps),
        )
        checkpoint.finish(dropped={**DROPPED, **unread(f"{ROOT}.layers", own=config.own_layers, total=N)})
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
        """The oracle's packed caches have nothing to hand to the layers that read an earlier one's."""
        return "its last layers ask earlier layers' caches for keys and values, which the oracle's packed caches do not give"

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one for each layer with keys and values of its own."""
        made = (block.attention.make_cache() for block in self.blocks)
        return tuple(cache for cache in made if cache is not None)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches.

        Numerics: the embedding's factor sqrt(D) is rounded to its dtype.
        """
        x_BLD = self.embedding(ids_BL) * self.config.hidden_size**0.5
        inputs = self.inputs(ids_BL, x_BLD)
        x_nBLD = self.copies.split(x_BLD)
        seen: list[SeenKV] = []
        longer: list[Cache] = []
        for i, (block, donor, input_BLP) in enumerate(zip(self.blocks, self.donors, inputs, strict=True)):
            own, donated = (caches[i], None) if donor == i else (None, seen[donor])
            x_nBLD, new, kv = block(x_nBLD, own, donated, input_BLP)
            seen.append(kv)
            longer += [] if new is None else [new]
        return self.norm(self.copies.joined(x_nBLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states, capped where the config says so."""
        logits_BLV = self.embedding.as_head(hidden_BLD)
        cap = self.config.final_logit_softcapping
        logits_BLV = logits_BLV if cap is None else soft_capped(logits_BLV, cap)
        return tap("model", tap(ROOT, logits_BLV))
