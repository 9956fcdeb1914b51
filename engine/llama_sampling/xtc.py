"""XTC, "exclude top choices": now and then the most probable candidates go, but for the last that clears a threshold.

Guarantees: at least one candidate at or above the threshold survives, so nothing improbable is forced. Differs from mlx-lm's
filter of that name: a probability equal to the threshold counts, and no id is exempt. Differs from llama.cpp at a threshold
of 0 or less, where that counts masked ids among the top choices and can leave nothing else.
"""

from dataclasses import dataclass

import numpy as np

from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.context import Context
from engine.llama_sampling.options import check_number, check_whole


@dataclass(frozen=True, slots=True)
class XTC:
    """Drops the leading candidates at or above the threshold, all but the last of them, with a probability.

    Attributes:
        probability: Of acting at all; 0 or less turns the sampler off.
        threshold: Above 0.5 turns the sampler off, as two candidates could not reach it.
        min_keep: Survivors at least; where fewer would stay, nothing is dropped.

    Numerics: one float32 draw a step, made whenever the sampler is on; probabilities in float32.
    Source: spec/samplers.md section 3.2.
    """

    probability: float
    threshold: float = 0.1
    min_keep: int = 1

    def __post_init__(self) -> None:
        check_number("XTC probability", self.probability, high=1)
        check_number("XTC threshold", self.threshold)
        check_whole("min_keep", self.min_keep, low=0)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """Candidates sorted, the leading ones dropped; as they were when off or not drawn."""
        if self.probability <= 0 or self.threshold > 0.5 or len(candidates) < 2:
            return candidates
        if context.xtc_prng.next_float() > np.float32(self.probability):
            return candidates
        ranked = candidates.sorted().softmaxed()
        assert ranked.probs is not None  # noqa: S101 - softmaxed gives them
        clearing = (ranked.probs >= np.float32(self.threshold)) & (ranked.probs > 0)
        last = int(np.count_nonzero(clearing)) - 1  # they descend, so those that clear it lead
        if last <= 0 or len(ranked) - last < self.min_keep:
            return ranked
        return ranked.taken(slice(last, None), is_sorted=True)
