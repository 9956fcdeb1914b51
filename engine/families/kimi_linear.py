"""kimi_linear: layers of delta attention, and one of latent attention after every few.

The latent layers turn nothing: they know positions only through the layers between them. The feed-forward layers route each
token to a few experts beside shared ones, the first ones excepted.

Source: Kimi Team 2025 (Kimi Linear); spec/models.md sections 4 and 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import swiglu
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.recurrent import RecurrentCache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed
from engine.delta_attention import STATE_SLOTS, DeltaAttention, DeltaSizes
from engine.latent_attention import (
    LatentHeads,
    LatentSizes,
    allowed_positions,
    as_latents,
    check_latent_sizes,
    latent_scale,
)
from engine.linear import Embedding, Linear
from engine.mlp import GatedMLP
from engine.moe import NUMBERED_NAMES, GatedExperts
from engine.norm import RMSNorm
from engine.router import Choice, LinearRouter, RoutedMLP
from engine.taps import tap

FIXED: Final[Mapping[str, object]] = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "q_lora_rank": None,
    "rope_scaling": None,
    "use_grouped_topk": True,
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "auto_map": "code of another library",
    "head_dim": "the widths of a latent head stand in keys of their own",
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "model_max_length": "a promise about training; positions are not limited here",
    "num_key_value_heads": "latent attention has no heads of keys and values",
    "num_nextn_predict_layers": "tensors of model.mtp are dropped, however many",
    "rope_theta": "nothing is turned",
}
DROPPED: Final[Mapping[str, str]] = {r"model\.mtp.*": "predicts a further token; not computed"}
TIED: Final[Mapping[str, str]] = {r"lm_head\..*": "a copy of the embedding, to which the head is tied"}
FLOOR: Final = 1e-20  # added to the sum of a token's weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a kimi_linear; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    rms_norm_eps: float
    linear_attn_config: Mapping[str, Any]
    num_experts: int
    moe_intermediate_size: int
    num_experts_per_token: int = 1
    num_shared_experts: int = 0
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "Config":
        """Read config.json; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown key, a wrong type or value, or sizes, layers or experts that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        DeltaSizes.read(config.linear_attn_config, layers=config.num_hidden_layers)
        widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_latent_sizes(**{key: getattr(config, key) for key in ("moe_layer_freq", "num_attention_heads", *widths)})
        if any(config.has_experts(layer) for layer in range(config.num_hidden_layers)):
            keys = ("num_experts", "num_experts_per_token", "num_expert_group", "topk_group")
            config.choice.check({key: getattr(config, key) for key in keys})
        return config

    @property
    def delta(self) -> DeltaSizes:
        """Sizes of the layers of delta attention, and which they are."""
        return DeltaSizes.read(self.linear_attn_config, layers=self.num_hidden_layers)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts rather than one dense feed-forward."""
        due = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return due and self.num_experts > 0

    @property
    def choice(self) -> Choice:
        """Numbers of the router."""
        return Choice(
            experts=self.num_experts,
            chosen=self.num_experts_per_token,
            groups=self.num_expert_group,
            kept=self.topk_group,
            normalised=self.moe_renormalize,
            factor=self.routed_scaling_factor,
            floor=FLOOR,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Latent self-attention without positions."""

    path: str
    q: Linear
    heads: LatentHeads
    sizes: LatentSizes

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, config: Config) -> "Attention":
        """Take projections and norm from the checkpoint."""
        sizes = LatentSizes(
            width=config.hidden_size,
            heads=config.num_attention_heads,
            rank=config.kv_lora_rank,
            own=config.qk_nope_head_dim,
            shared=config.qk_rope_head_dim,
            value=config.v_head_dim,
            eps=config.rms_norm_eps,
        )
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.q_proj", inputs=sizes.width, outputs=sizes.heads * sizes.key),
            heads=LatentHeads.take(checkpoint, path, sizes),
            sizes=sizes,
        )

    def __call__(self, x_BLD: mx.array, cache: Cache) -> tuple[mx.array, Cache]:
        """Attend from [B, L, D] to everything in the cache and to itself; returns [B, L, D] and the longer cache."""
        B, L, _ = x_BLD.shape
        latents = as_latents(cache)
        allowed = allowed_positions(L, before=latents.offset)
        q_BHLE = self.q(x_BLD).reshape(B, L, -1, self.sizes.key).swapaxes(1, 2)
        own_BHLN, shared_BHLR = mx.split(q_BHLE, [self.sizes.own], axis=-1)
        longer, latents_B1TC, keys_B1TR = latents.append(*self.heads.compress(x_BLD))
        scale = latent_scale(self.sizes.key, None)
        out_BLD = self.heads.attend(own_BHLN, shared_BHLR, latents_B1TC, keys_B1TR, scale=scale, allowed=allowed)
        return tap(self.path, out_BLD), longer


def take_experts(checkpoint: Checkpoint, layer: str, config: Config) -> RoutedMLP:
    """Take a layer's router and experts from the checkpoint, under their own names or the hub's."""
    path, hub = f"{layer}.mlp", f"{layer}.block_sparse_moe"
    D, inner, shared = config.hidden_size, config.moe_intermediate_size, config.num_shared_experts
    bias = f"{path}.e_score_correction_bias"
    renamed = {f"{hub}.gate.e_score_correction_bias": bias, f"{hub}.gate.weight": f"{path}.gate.weight"}
    renamed |= {f"{hub}.shared_experts.{n}.weight": f"{path}.shared_experts.{n}.weight" for n in NUMBERED_NAMES}
    for old, new in renamed.items():
        if old in checkpoint:
            checkpoint.replace([old], [new], lambda array: [array])
    return RoutedMLP(
        path=path,
        router=LinearRouter(
            linear=Linear.take(checkpoint, f"{path}.gate", inputs=D, outputs=config.num_experts),
            bias=checkpoint.take(bias, (config.num_experts,)),
            choice=config.choice,
        ),
        experts=GatedExperts.take(
            checkpoint,
            f"{path}.switch_mlp",
            experts=config.num_experts,
            width=D,
            inner=inner,
            activation=swiglu,
            apart=lambda expert, name: f"{hub}.experts.{expert}.{NUMBERED_NAMES[name]}",
        ),
        shared=GatedMLP.take(checkpoint, f"{path}.shared_experts", width=D, inner=shared * inner) if shared else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    path: str
    input_norm: RMSNorm
    attention: Attention | DeltaAttention
    post_norm: RMSNorm
    mlp: GatedMLP | RoutedMLP

    @classmethod
    def take(cls, checkpoint: Checkpoint, layer: int, config: Config) -> "Block":
        """Take one layer from the checkpoint."""
        path, D, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        return cls(
            path=path,
            input_norm=RMSNorm.take(checkpoint, f"{path}.input_layernorm", width=D, eps=eps),
            attention=DeltaAttention.take(checkpoint, f"{path}.self_attn", config.delta, width=D, eps=eps)
            if layer + 1 in config.delta.kda_layers
            else Attention.take(checkpoint, f"{path}.self_attn", config),
            post_norm=RMSNorm.take(checkpoint, f"{path}.post_attention_layernorm", width=D, eps=eps),
            mlp=take_experts(checkpoint, path, config)
            if config.has_experts(layer)
            else GatedMLP.take(checkpoint, f"{path}.mlp", width=D, inner=config.intermediate_size),
        )

    def __call__(self, x_BLD: mx.array, cache: Cache) -> tuple[mx.array, Cache]:
        """One layer."""
        attended, longer = self.attention(self.input_norm(x_BLD), cache)
        h_BLD = x_BLD + attended
        return tap(self.path, h_BLD + self.mlp(self.post_norm(h_BLD))), longer


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
        D, V, tied = config.hidden_size, config.vocab_size, config.tie_word_embeddings
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, "model.embed_tokens", vocabulary=V, width=D),
            blocks=tuple(Block.take(checkpoint, i, config) for i in range(config.num_hidden_layers)),
            norm=RMSNorm.take(checkpoint, "model.norm", width=D, eps=config.rms_norm_eps),
            head=None if tied else Linear.take(checkpoint, "lm_head", inputs=D, outputs=V),
        )
        checkpoint.finish(dropped={**DROPPED, **TIED} if tied else DROPPED)
        return model

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: ids are below it."""
        return self.config.vocab_size

    @property
    def head_width(self) -> int:
        """Elements of a latent, which is what stands in a cache in the place of keys."""
        return self.config.kv_lora_rank

    @property
    def no_packed_kv(self) -> str | None:
        """Latents stay as computed."""
        return "latents are multiplied outside attention too, where packed ones have no product"

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches, one a layer."""
        deltas = (isinstance(block.attention, DeltaAttention) for block in self.blocks)
        return tuple(RecurrentCache.empty(STATE_SLOTS) if delta else PlainCache() for delta in deltas)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, new = block(x_BLD, cache)
            longer.append(new)
        return tap("model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.embedding.as_head(hidden_BLD) if self.head is None else self.head(hidden_BLD)
