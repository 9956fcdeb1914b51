"""What a row of logits says about a token: surprisal, entropy, perplexity.

Guarantees: computed by numpy in float64 from the stored float values, so that the figures do not depend on the dtype or
the device that made the logits. They describe; no verdict rests on them.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt


def log_softmax(logits: mx.array) -> npt.NDArray[np.float64]:
    """Natural log-probabilities of logits [..., V], float64, same shape."""
    values = np.array(logits.astype(mx.float32), dtype=np.float64)
    shifted = values - values.max(axis=-1, keepdims=True)
    logp: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logp


def surprisal(logits_LV: mx.array, token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Surprisal in nats of each token under its row, [L].

    Args:
        logits_LV: Row i predicts `token_ids[i]`.
        token_ids: L ids.

    Raises:
        ValueError: There are not as many rows as ids.
    """
    if logits_LV.shape[0] != len(token_ids):
        raise ValueError(f"{logits_LV.shape[0]} rows cannot predict {len(token_ids)} tokens")
    picked: npt.NDArray[np.float64] = log_softmax(logits_LV)[np.arange(len(token_ids)), np.asarray(token_ids)]
    return -picked


def entropy(logits: mx.array) -> npt.NDArray[np.float64]:
    """Entropy in nats of each row of logits [..., V]."""
    logp = log_softmax(logits)
    nats: npt.NDArray[np.float64] = -(np.exp(logp) * np.where(np.isneginf(logp), 0.0, logp)).sum(axis=-1)
    return nats


def perplexity(logits_LV: mx.array, token_ids: Sequence[int]) -> float:
    """exp of the mean surprisal of `token_ids`, row i of the logits predicting token i."""
    return math.exp(float(surprisal(logits_LV, token_ids).mean()))
