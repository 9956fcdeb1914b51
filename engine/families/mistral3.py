"""mistral3: the text model of a vision-language snapshot; the tower beside it is dropped.

The text model is a ministral3, a mistral or a llama, as `text_config` says, and is made of that family's parts. One thing is
the wrapper's own: every layer keeps every position, so a window is a mask over a plain cache and never a ring.

Tensors are named `language_model.model.X` where the snapshot was converted, `model.language_model.X` or plainly `model.X` on
the hub; the first is what modules are called here.

Source: spec/oracles.md section 1 (cache kinds).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, as_kv
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.errors import ConfigError
from engine.families import llama, ministral3
from engine.linear import Embedding, Linear
from engine.norm import RMSNorm
from engine.rope import make_rope
from engine.taps import tap

TEXT: Final = "language_model"
IRRELEVANT: Final[Mapping[str, str]] = {
    "image_token_id": "images are not read",
    "image_token_index": "images are not read",
    "multimodal_projector_bias": "images are not read",
    "projector_hidden_act": "images are not read",
    "spatial_merge_size": "images are not read",
    "tie_word_embeddings": "the text model's own entry decides",
    "vision_config": "images are not read",
    "vision_feature_layer": "images are not read",
}
DROPPED: Final[Mapping[str, str]] = {
    r".*vision_tower.*": "images are not read",
    r".*multi_modal_projector.*": "images are not read",
    **ministral3.DROPPED,
}
TextConfig = llama.Config | ministral3.Config
TextBlock = llama.Block | ministral3.Block
Layer = Callable[..., tuple[mx.array, KVCache]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a mistral3.

    Attributes:
        text_config: The text model's config, of another family.
    """

    text_config: Mapping[str, Any]

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> TextConfig:
        """Read config.json and the text model's config in it.

        Raises:
            ConfigError: An unknown key, a text model of another family, or one that its family refuses.
        """
        text = {"tie_word_embeddings": False, **read_config(cls, raw, irrelevant=IRRELEVANT).text_config}
        match text.get("model_type"):
            case "ministral3":
                return ministral3.Config.read(text)
            case "mistral" | "llama":
                return llama.Config.read(text)
        raise ConfigError(
            f"mistral3 around a text model of model_type {text.get('model_type')!r} is not supported",
            supported="ministral3, mistral, llama",
            next_step="use a snapshot of one of these",
        )


def make_blocks(config: TextConfig, checkpoint: Checkpoint) -> tuple[TextBlock, ...]:
    """Take all layers from the checkpoint."""
    paths = [f"{TEXT}.model.layers.{i}" for i in range(config.num_hidden_layers)]
    if isinstance(config, ministral3.Config):
        turn = config.rope()
        return tuple(
            ministral3.Block.take(checkpoint, path, config, turn, config.window(i)) for i, path in enumerate(paths)
        )
    rope = make_rope(
        config.head_width,
        base=config.rope_theta,
        traditional=config.rope_traditional,
        scaling=config.rope_scaling,
        max_positions=config.max_position_embeddings,
    )
    return tuple(llama.Block.take(checkpoint, path, config, rope, config.window(i)) for i, path in enumerate(paths))


def undo_hub_layout(checkpoint: Checkpoint) -> None:
    """Call every tensor of the text model as a converted snapshot does."""
    for name in checkpoint.names:
        inner = name.removeprefix(f"{TEXT}.")
        if name.startswith(f"model.{TEXT}."):
            inner = f"model.{name.removeprefix(f'model.{TEXT}.')}"
        new = f"{TEXT}.{inner}"
        if new != name and "vision_tower" not in name and "multi_modal_projector" not in name:
            checkpoint.replace([name], [new], lambda array: [array])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Embedding, the text family's blocks, final norm, head (None where it is tied)."""

    config: TextConfig
    embedding: Embedding
    blocks: tuple[TextBlock, ...]
    norm: RMSNorm
    head: Linear | None

    @classmethod
    def build(cls, raw: Mapping[str, Any], checkpoint: Checkpoint) -> "Model":
        """Build from config.json and its checkpoint, using every tensor once.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen, or two layouts are mixed.
        """
        config = Config.read(raw)
        D, V, tied = config.hidden_size, config.vocab_size, config.tie_word_embeddings
        undo_hub_layout(checkpoint)
        if isinstance(config, ministral3.Config):
            ministral3.undo_hub_layout(checkpoint)
        model = cls(
            config=config,
            embedding=Embedding.take(checkpoint, f"{TEXT}.model.embed_tokens", vocabulary=V, width=D),
            blocks=make_blocks(config, checkpoint),
            norm=RMSNorm.take(checkpoint, f"{TEXT}.model.norm", width=D, eps=config.rms_norm_eps),
            head=None if tied else Linear.take(checkpoint, f"{TEXT}.lm_head", inputs=D, outputs=V),
        )
        checkpoint.finish(dropped={**DROPPED, **ministral3.TIED} if tied else DROPPED)
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
        """Empty caches, one a layer, whatever its window."""
        return tuple(PlainCache() for _ in self.blocks)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        x_BLD = self.embedding(ids_BL)
        config = self.config
        extra: tuple[mx.array, ...] = ()
        if isinstance(config, ministral3.Config):
            extra = (ministral3.query_growth(config, x_BLD, caches[0].offset),)
        longer: list[Cache] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            layer: Layer = block
            x_BLD, new = layer(x_BLD, *extra, as_kv(cache))
            longer.append(new)
        return tap(f"{TEXT}.model", self.norm(x_BLD)), tuple(longer)

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        head = self.embedding.as_head if self.head is None else self.head
        return tap(TEXT, head(hidden_BLD))
