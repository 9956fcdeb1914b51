"""A model as the loop sees it, opening one from a snapshot, and the check of what it is fed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import mlx.core as mx

from engine.cache.protocol import Cache
from engine.checkpoint import Checkpoint
from engine.config import load_json
from engine.dtype import DTYPES, DTypeName
from engine.errors import RequestError
from engine.families import family_module
from engine.quantization import Quantization


class CausalModel(Protocol):
    """What every family's `Model` offers."""

    @property
    def vocabulary(self) -> int:
        """Ids are below it."""
        ...

    @property
    def head_width(self) -> int:
        """Elements of a key or value head."""
        ...

    @property
    def no_packed_kv(self) -> str | None:
        """Why keys and values cannot be packed in this family; None where they can."""
        ...

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches for a new sequence."""
        ...

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        ...

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        ...


@runtime_checkable
class FastCaches(Protocol):
    """A model that is faster on caches of its own than on those that it makes."""

    def fast_caches(self, caches: Sequence[Cache]) -> tuple[Cache, ...]:
        """Its own caches in the place of empty ones; any others as they are."""
        ...


def open_model(folder: Path, *, dtype: DTypeName) -> CausalModel:
    """Open a snapshot.

    Args:
        folder: A hub-shaped model folder.
        dtype: What every floating tensor is cast to, and so what the model computes in.

    Raises:
        ConfigError: config.json is missing, malformed or of an unsupported family.
        CheckpointError: The weights are missing, damaged or not those of the config.
    """
    raw = load_json(folder / "config.json")
    family = family_module(raw.get("model_type"))
    checkpoint = Checkpoint.open(folder, dtype=DTYPES[dtype], quantization=Quantization.from_config(raw))
    model: CausalModel = family.Model.build(raw, checkpoint)
    return model


def check_ids(model: CausalModel, ids: Sequence[int], subject: str) -> None:
    """Refuse ids that no row of the embedding is for.

    Args:
        model: From `open_model`.
        ids: To be fed.
        subject: What the message begins with, such as `the prompt has token ids`.

    Raises:
        RequestError: One is below 0 or not below the vocabulary.
    """
    if bad := [token_id for token_id in ids if not 0 <= token_id < model.vocabulary]:
        raise RequestError(
            f"{subject} outside the vocabulary",
            ids=", ".join(map(str, bad[:5])),
            vocabulary=f"0 to {model.vocabulary - 1}",
            next_step="tokenise with the tokenizer of this snapshot",
        )
