"""Embedding use of a model: the last hidden state of a text, at unit length, alone or in a batch."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine.dtype import DTypeName
from engine.embedding_model import embed
from engine.errors import RequestError
from engine.model import CausalModel, open_model
from parity.golden import GOLDENS, Golden
from parity.models.fetch import ensure_snapshot
from parity.trace import activation_name
from tests.engine.families.committed_golden import PLATFORM, needs_goldens

Check = Callable[..., None]
TEXTS = [[3, 17, 99, 0, 511, 64, 7], [5, 5, 41, 88, 2, 100, 7], [9, 8, 7, 6, 5, 4, 7]]

dtypes = pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])


def model(dtype: DTypeName = "f32", name: str = "qwen3-tiny") -> CausalModel:
    return open_model(ensure_snapshot(name).path, dtype=dtype)


@dtypes
def test_a_row_of_a_batch_is_the_text_alone(same_bits: Check, dtype: DTypeName) -> None:
    loaded = model(dtype)
    together = embed(loaded, TEXTS)
    for i, text in enumerate(TEXTS):
        same_bits(together[i : i + 1], embed(loaded, [text]))


@dtypes
def test_vectors_are_float32_of_unit_length(dtype: DTypeName) -> None:
    vectors = embed(model(dtype), TEXTS)
    assert (vectors.dtype, vectors.shape) == (mx.float32, (3, 128))
    lengths = np.linalg.norm(np.array(vectors, dtype=np.float64), axis=-1)
    assert np.abs(lengths - 1).max() < 1e-6


@dtypes
def test_it_is_the_last_hidden_state_after_the_final_norm(same_bits: Check, dtype: DTypeName) -> None:
    loaded = model(dtype)
    hidden, _ = loaded.hidden(mx.array(TEXTS), loaded.make_caches())
    last = hidden[:, -1].astype(mx.float32)
    same_bits(last / mx.sqrt((last * last).sum(axis=-1, keepdims=True)), embed(loaded, TEXTS))


@needs_goldens
def test_it_points_where_the_oracles_hidden_state_points() -> None:
    golden = Golden.load(GOLDENS / "mlx-lm-0.32.2" / PLATFORM / "qwen3-tiny/f32/fp/forced/p40-taps-tail-split.json")
    hidden = golden.tensors[activation_name(0, "model")].values()[0]  # bit-identical to ours by the gate
    vector = np.array(embed(model(), [golden.case.prompt_ids]), dtype=np.float64)[0]
    assert np.abs(vector - hidden / np.linalg.norm(hidden)).max() < 1e-7


def test_every_token_counts(other_bits: Check) -> None:
    loaded = model()
    for position in range(len(TEXTS[0])):
        changed = [*TEXTS[0]]
        changed[position] += 1 if changed[position] < 511 else -1
        other_bits(embed(loaded, [TEXTS[0]]), embed(loaded, [changed]))


def test_an_embedding_alters_nothing_that_comes_after(same_bits: Check) -> None:
    loaded = model()
    first = embed(loaded, [TEXTS[0]])
    embed(loaded, [TEXTS[1]])
    same_bits(first, embed(loaded, [TEXTS[0]]))


@pytest.mark.parametrize(
    ("texts", "count", "lengths"), [([], 0, "none"), ([[]], 1, "0"), ([[1, 2], [3]], 2, "1, 2")], ids=str
)
def test_texts_that_do_not_fit_together_are_refused(texts: list[list[int]], count: int, lengths: str) -> None:
    with pytest.raises(RequestError) as caught:
        embed(model(), texts)
    assert str(caught.value) == (
        "texts to embed together must have one length, of at least one token\n"
        f"  texts    {count}\n"
        f"  lengths  {lengths}\n"
        "  next     embed texts of other lengths in calls of their own"
    )


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        embed(model(), [[1, 512], [-1, 3]])
    assert str(caught.value) == (
        "a text to embed has token ids outside the vocabulary\n"
        "  ids         512, -1\n"
        "  vocabulary  0 to 511\n"
        "  next        tokenise with the tokenizer of this snapshot"
    )
