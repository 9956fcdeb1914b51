"""Embedding use of a language model: one vector a text, for comparing texts.

The hidden state after the final norm at the last position, in float32, scaled to unit length, so that the product of two
vectors is the cosine of their angle. The head is not computed and nothing is remembered. Tokenising, the instruction before
a query and the end token after every text are the caller's: what the last position is decides what the vector means.

Source: spec/generate.md section 12; spec/models.md section 2.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from engine.errors import RequestError
from engine.model import CausalModel, check_ids

LEAST_LENGTH: Final = 1e-12  # a vector shorter than this is left shorter than 1 rather than divided by nothing


def embed(model: CausalModel, ids: Sequence[Sequence[int]]) -> mx.array:
    """Embed texts of one length.

    Args:
        model: From `open_model`; an embedding model, or the vectors mean little.
        ids: B texts of L token ids each, the end token included. Texts of other lengths take calls of their own: padding
            would change what the last position is.

    Returns:
        [B, D], float32, each row of unit length.

    Raises:
        RequestError: No text, an empty one, texts of several lengths, or an id outside the vocabulary.

    Numerics: the forward in the model's dtype; length and quotient in float32. A row has the bits that it has alone.
    """
    _check(model, ids)
    hidden_BLD, _ = model.hidden(mx.array([list(text) for text in ids]), model.make_caches())
    last_BD = hidden_BLD[:, -1].astype(mx.float32)
    length_B1 = mx.sqrt(mx.sum(last_BD * last_BD, axis=-1, keepdims=True))
    return last_BD / mx.maximum(length_B1, LEAST_LENGTH)


def _check(model: CausalModel, ids: Sequence[Sequence[int]]) -> None:
    lengths = sorted({len(text) for text in ids})
    if len(lengths) != 1 or not lengths[0]:
        raise RequestError(
            "texts to embed together must have one length, of at least one token",
            texts=len(ids),
            lengths=", ".join(map(str, lengths)) or "none",
            next_step="embed texts of other lengths in calls of their own",
        )
    check_ids(model, [token_id for text in ids for token_id in text], "a text to embed has token ids")
