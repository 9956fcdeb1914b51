"""What a row of logits says about a token: surprisal, entropy, perplexity; of the model, and of what a sampler left of it.

Guarantees: computed by numpy in float64 from the stored float values, so that the figures do not depend on the dtype or
the device that made the logits. They describe; no verdict rests on them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Base = Literal["nats", "bits", "base10"]
NATS: Final[dict[Base, float]] = {"nats": 1.0, "bits": math.log(2), "base10": math.log(10)}  # in one unit of each base


def log_softmax(logits: mx.array) -> npt.NDArray[np.float64]:
    """Natural log-probabilities of logits [..., V], float64, same shape."""
    values = np.array(logits.astype(mx.float32), dtype=np.float64)
    shifted = values - values.max(axis=-1, keepdims=True)
    logp: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logp


def surprisal(logits_LV: mx.array, token_ids: Sequence[int], *, base: Base = "nats") -> npt.NDArray[np.float64]:
    """Surprisal of each token under its row, [L]; infinite for a token that is ruled out.

    Args:
        logits_LV: Row i predicts `token_ids[i]`.
        token_ids: L ids.
        base: Unit of the result.

    Raises:
        ValueError: There are not as many rows as ids, or the base is unknown.
    """
    unit = _unit(base)
    if logits_LV.shape[0] != len(token_ids):
        raise ValueError(f"{logits_LV.shape[0]} rows cannot predict {len(token_ids)} tokens")
    picked: npt.NDArray[np.float64] = log_softmax(logits_LV)[np.arange(len(token_ids)), np.asarray(token_ids)]
    return -picked / unit


def entropy(logits: mx.array, *, base: Base = "nats") -> npt.NDArray[np.float64]:
    """Entropy of each row of logits [..., V].

    Raises:
        ValueError: The base is unknown.
    """
    unit = _unit(base)
    logp = log_softmax(logits)
    nats: npt.NDArray[np.float64] = -(np.exp(logp) * np.where(np.isneginf(logp), 0.0, logp)).sum(axis=-1)
    return nats / unit


def perplexity(logits_LV: mx.array, token_ids: Sequence[int]) -> float:
    """exp of the mean surprisal of `token_ids`, row i of the logits predicting token i."""
    return math.exp(float(surprisal(logits_LV, token_ids).mean()))


def sampling_surprisal(
    kept_LV: mx.array, token_ids: Sequence[int], *, temperature: float = 1.0, base: Base = "nats"
) -> npt.NDArray[np.float64]:
    """Surprisal of each token among those that the filters of its sampler left, [L].

    Args:
        kept_LV: Row i with every token at -inf that was ruled out (`engine.sampling.chain.filtered`), before temperature.
        token_ids: L ids.
        temperature: Of the draw; above 0.
        base: Unit of the result.

    Returns:
        0 where one token was left, infinite where the token was not.

    Raises:
        ValueError: There are not as many rows as ids, the temperature is not above 0, or the base is unknown.
    """
    if not temperature > 0:
        raise ValueError(f"no distribution at temperature {temperature}")
    return surprisal(kept_LV.astype(mx.float32) * (1 / temperature), token_ids, base=base)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingPerplexity:
    """Perplexity of what was told so far. A value: adding gives another, so a fork of a sequence forks it by keeping it.

    Attributes:
        nats: Sum of the surprisals.
        count: How many.
    """

    nats: float = 0.0
    count: int = 0

    def add(self, surprisal_nats: float) -> Self:
        """With one more token; a negative surprisal counts as 0, one that is not finite is passed over."""
        if not math.isfinite(surprisal_nats):
            return self
        return type(self)(nats=self.nats + max(surprisal_nats, 0.0), count=self.count + 1)

    @property
    def value(self) -> float:
        """exp of the mean surprisal; infinite before the first token."""
        return math.exp(self.nats / self.count) if self.count else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMetrics:
    """Both perplexities of a sequence: of the model's own logits, and of the distributions that were drawn from.

    Attributes:
        model: Over all tokens.
        sampling: Over the tokens that a sampler drew.
    """

    model: RollingPerplexity = RollingPerplexity()
    sampling: RollingPerplexity = RollingPerplexity()

    def accept(self, *, model_nats: float, sampling_nats: float | None = None) -> Self:
        """With one more token; without `sampling_nats` it was given and not drawn, and only the model's counts it."""
        sampling = self.sampling if sampling_nats is None else self.sampling.add(sampling_nats)
        return type(self)(model=self.model.add(model_nats), sampling=sampling)


def _unit(base: Base) -> float:
    if base not in NATS:
        raise ValueError(f"unknown base {base!r}; known are {', '.join(NATS)}")
    return NATS[base]
