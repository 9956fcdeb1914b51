"""Temperature, dynamic temperature, and the entropy-dependent temperature of lloyal's examples.

Guarantees: temperature 0 or less leaves exactly one candidate possible, the first of the largest; the order of candidates by
logit never changes otherwise.
"""

import math
from dataclasses import dataclass

import numpy as np

from engine.errors import RequestError
from engine.llama_sampling.candidates import Candidates, entropy32
from engine.llama_sampling.context import Context
from engine.llama_sampling.options import check_number


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divides the logits.

    Attributes:
        temperature: 0 or less masks all but the first of the largest.

    Numerics: one division in float32.
    Source: spec/samplers.md section 3.2.
    """

    temperature: float

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """The same candidates with other logits."""
        del context
        return divided(candidates, np.float32(self.temperature))


@dataclass(frozen=True, slots=True)
class DynamicTemperature:
    """A temperature between two ends, placed by the entropy of the candidates.

    Attributes:
        temperature: Middle of the range.
        delta: Half its width; 0 or less makes this a plain temperature.
        exponent: Of the normalised entropy.

    Numerics: entropy in float32 from the most probable down; probabilities after it from double terms and a double sum.
    Source: spec/samplers.md section 3.2.
    """

    temperature: float
    delta: float
    exponent: float = 1.0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        check_number("dynamic temperature range", self.delta)
        check_number("dynamic temperature exponent", self.exponent, low=0)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """Candidates sorted and divided; with a range, a single candidate stays as it is."""
        del context
        middle, delta = np.float32(self.temperature), np.float32(self.delta)
        if delta <= 0:
            return divided(candidates, middle)
        if len(candidates) <= 1:
            return candidates
        low, high = max(np.float32(0), middle - delta), middle + delta
        ranked = candidates.sorted().softmaxed()
        assert ranked.probs is not None  # noqa: S101 - softmaxed gives them
        largest = -np.float32(math.log(np.float32(1) / np.float32(len(ranked))))
        share = np.float32(math.pow(float(entropy32(ranked.probs) / largest), self.exponent))
        return _with_double_probs(divided(ranked, low + (high - low) * share))


def divided(candidates: Candidates, temperature: np.float32) -> Candidates:
    """Candidates with logits over a temperature; at 0 or below only the first of the largest stays possible."""
    logits = candidates.logits
    if temperature <= 0:
        masked = np.full_like(logits, -np.inf)
        best = int(logits.argmax())
        masked[best] = logits[best]
        return candidates.with_logits(masked, is_sorted=candidates.is_sorted)
    with np.errstate(over="ignore"):
        hot = logits / temperature
    if np.isposinf(hot).any():
        raise RequestError(
            "the temperature is so low that logits overflow",
            temperature=float(temperature),
            largest_logit=float(logits.max()),
            next_step="use temperature 0 for the most probable token",
        )
    return candidates.with_logits(hot, is_sorted=candidates.is_sorted)


def entropy_dependent_temperature(
    entropy_nats: float, *, scale: float = 1.0, base: float = 0.8, theta: float = 1.5
) -> float:
    """The temperature scale · base^(theta / max(entropy, 0.1)): cool where the model is sure.

    Source: spec/samplers.md section 4.
    """
    return float(scale * base ** (theta / max(entropy_nats, 0.1)))


def _with_double_probs(candidates: Candidates) -> Candidates:
    """Probabilities from double terms and their double sum, each rounded to float32 before and after the division."""
    logits = candidates.logits.astype(np.float64)
    terms = np.exp(logits - logits[0])
    probs = (terms.astype(np.float32) / np.add.accumulate(terms)[-1]).astype(np.float32)
    return candidates.with_probs(probs)
