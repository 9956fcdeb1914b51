"""One forward of a batch, and which models can run one.

A batch asks of a family's graph that it takes a position a row from its caches, and keeps padding out of its states. Which
families do is a list, because a case holds each of them to the oracle's batches; the others are refused.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from engine.cache.batch import check_kinds
from engine.cache.protocol import Cache
from engine.errors import RequestError
from engine.generate import last_row
from engine.model import CausalModel, check_ids

FAMILIES: Final = frozenset(  # held to the oracle's batches by cases
    {
        "cohere2",
        "falcon_h1",
        "gemma",
        "gemma3_text",
        "gemma3n",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "gpt_oss",
        "granite",
        "granitemoehybrid",
        "lfm2",
        "llama",
        "mamba2",
        "minicpm",
        "mixtral",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "smollm3",
        "starcoder2",
    }
)


def step_batch(
    model: CausalModel, token_ids: Sequence[int], caches: Sequence[Cache]
) -> tuple[mx.array, tuple[Cache, ...]]:
    """Feed one token a row.

    Args:
        model: From `open_model`.
        token_ids: B ids.
        caches: Batch caches of B rows (`engine.cache.batch.merged`).

    Returns:
        Logits [B, V], evaluated, and the longer caches.

    Raises:
        RequestError: The model cannot run in batches, or an id is outside the vocabulary.
    """
    check_batchable(model)
    check_ids(model, token_ids, "the batch has token ids")
    return batch_forward(model, mx.array([[token_id] for token_id in token_ids]), caches)


def check_batchable(model: CausalModel) -> None:
    """Refuse a model whose graph reads one position for all rows, or whose caches no batch can hold.

    Raises:
        RequestError: It does, or has such a cache.
    """
    graph = getattr(model, "linear", model)  # what a model on fused kernels runs batches on
    family = type(graph).__module__.rpartition(".")[2]
    if family not in FAMILIES:
        raise RequestError(
            "the family does not run in batches",
            family=family,
            known=", ".join(sorted(FAMILIES)),
            next_step="run the sequences one by one",
        )
    check_kinds(model.make_caches())


def batch_forward(model: CausalModel, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
    """Logits [B, V] at the last column, evaluated, and the longer caches."""
    hidden_BLD, longer = model.hidden(ids_BL, caches)
    logits_BV = last_row(model, hidden_BLD)
    mx.eval(logits_BV, [cache.arrays for cache in longer])
    return logits_BV, longer
