"""Mirostat 1 and 2: picks that steer the surprisal of what they draw towards a target.

Guarantees: values; the state mu goes in with the pick and comes out with the next one, so a clone is an assignment and two
branches never share it. At least one candidate is kept.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from engine.llama_sampling.candidates import Candidates, Float32s
from engine.llama_sampling.context import Context, Picked
from engine.llama_sampling.draw import draw_discrete
from engine.llama_sampling.options import check_number, check_whole

TAU: Final = 5.0
ETA: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirostat:
    """Version 1: the exponent of a Zipf law is fitted to the leading candidates and gives how many to keep.

    Attributes:
        tau: Target surprisal in bits.
        eta: Learning rate.
        m: Leading candidates of the fit.
        mu: State, twice the target at first.

    Numerics: float32 sums from first to last; each power and logarithm rounded to float32.
    Source: spec/samplers.md section 3.4; Basu et al., "Mirostat", 2021.
    """

    tau: float = TAU
    eta: float = ETA
    m: int = 100
    mu: float | None = None

    def __post_init__(self) -> None:
        _check(self.tau, self.eta, self.mu)
        check_whole("mirostat m", self.m, low=2)

    def pick(self, candidates: Candidates, context: Context) -> Picked:
        """Sort, cut to the fitted count, draw, move mu."""
        candidates.check_some_possible()
        ranked = candidates.sorted().softmaxed()
        assert ranked.probs is not None  # noqa: S101 - softmaxed gives them
        mu = _start(self.tau, self.mu)
        count = keep_count(zipf_exponent(ranked.probs, self.m), mu, context.vocabulary)
        kept = ranked.taken(slice(0, count), is_sorted=True).softmaxed()
        index, moved = _draw(kept, context, mu=mu, tau=self.tau, eta=self.eta)
        return Picked(index=index, candidates=kept, pick=replace(self, mu=moved))


@dataclass(frozen=True, slots=True, kw_only=True)
class MirostatV2:
    """Version 2: candidates whose surprisal is above mu go.

    Attributes:
        tau: Target surprisal in bits.
        eta: Learning rate.
        mu: State, twice the target at first.

    Numerics: float32; the base-2 logarithm rounded to float32.
    Source: spec/samplers.md section 3.4.
    """

    tau: float = TAU
    eta: float = ETA
    mu: float | None = None

    def __post_init__(self) -> None:
        _check(self.tau, self.eta, self.mu)

    def pick(self, candidates: Candidates, context: Context) -> Picked:
        """Sort, cut before the first that is too surprising, draw, move mu."""
        candidates.check_some_possible()
        ranked = candidates.sorted().softmaxed()
        assert ranked.probs is not None  # noqa: S101 - softmaxed gives them
        mu = _start(self.tau, self.mu)
        with np.errstate(divide="ignore"):
            bits = -np.log2(ranked.probs.astype(np.float64)).astype(np.float32)
        above = bits > np.float32(mu)
        count = max(int(above.argmax()) if above.any() else len(ranked), 1)
        kept = ranked.taken(slice(0, count), is_sorted=True).softmaxed()
        index, moved = _draw(kept, context, mu=mu, tau=self.tau, eta=self.eta)
        return Picked(index=index, candidates=kept, pick=replace(self, mu=moved))


def zipf_exponent(probs: Float32s, m: int) -> np.float32:
    """Least-squares exponent of a Zipf law through the ratios of neighbours among the first m probabilities.

    Args:
        probs: Descending, float32 [N].
        m: Probabilities looked at.

    Returns:
        The exponent; infinite where a probability of 0 is among them, NaN for a single one.
    """
    pairs = min(m, len(probs)) - 1
    if pairs < 1:
        return np.float32(np.nan)
    place = np.arange(pairs, dtype=np.float32)
    step = _log32((place + np.float32(2)) / (place + np.float32(1)))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = _log32(probs[:pairs] / probs[1 : pairs + 1])
        return np.float32(np.add.accumulate(step * ratio)[-1] / np.add.accumulate(step * step)[-1])


def keep_count(exponent: np.float32, mu: float, vocabulary: int) -> int:
    """How many candidates reach the surprisal mu under a Zipf law; 1 where the law gives no number.

    Numerics: each power in double and rounded to float32, as a C library's powf gives.
    """
    excess = np.float32(exponent - np.float32(1))
    with np.errstate(all="ignore"):
        top = excess * np.float32(np.float64(2) ** np.float64(np.float32(mu)))
        share = np.float32(1) - np.float32(np.float64(vocabulary) ** np.float64(-excess))
        count = np.float32(np.float64(top / share) ** (1 / np.float64(exponent)))
    return max(int(min(count, np.float32(2**31 - 128))), 1) if math.isfinite(count) or count == np.inf else 1


def _draw(kept: Candidates, context: Context, *, mu: float, tau: float, eta: float) -> tuple[int, float]:
    """The drawn place, and mu moved by the surprisal of what was drawn."""
    assert kept.probs is not None  # noqa: S101 - the callers softmax
    index = draw_discrete(kept.probs, context.prng)
    observed = np.float32(-math.log2(kept.probs[index]))
    moved = np.float32(mu) - np.float32(eta) * (observed - np.float32(tau))
    return index, float(moved)


def _start(tau: float, mu: float | None) -> float:
    return float(np.float32(2) * np.float32(tau)) if mu is None else mu


def _check(tau: float, eta: float, mu: float | None) -> None:
    check_number("mirostat tau", tau, low=0)
    check_number("mirostat eta", eta, low=0)
    if mu is not None:
        check_number("mirostat mu", mu)


def _log32(values: Float32s) -> Float32s:
    return np.log(values.astype(np.float64)).astype(np.float32)
