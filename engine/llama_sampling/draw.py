"""Picks without a memory: greedy, and the draw by probability.

Guarantees: a candidate of probability 0 is never drawn, whatever the generator gives; a single candidate is picked without
a draw.
"""

from dataclasses import dataclass

import numpy as np

from engine.llama_sampling.candidates import Candidates, Float32s, exp32
from engine.llama_sampling.context import Context, Picked
from engine.llama_sampling.generators import Generator


@dataclass(frozen=True, slots=True)
class Greedy:
    """The largest logit; the first one on a tie.

    Source: spec/samplers.md section 3.2.
    """

    def pick(self, candidates: Candidates, context: Context) -> Picked:
        """The first of the largest; candidates stay as they are."""
        del context
        candidates.check_some_possible()
        return Picked(index=int(candidates.logits.argmax()), candidates=candidates, pick=self)


@dataclass(frozen=True, slots=True)
class Dist:
    """A draw by probability: a walk along the candidates in their order until the running sum reaches the drawn mass.

    Numerics: exp in float32; sums in double, from first to last; the probabilities shown are divided in double and rounded.
    Source: spec/samplers.md section 3.5.
    """

    def pick(self, candidates: Candidates, context: Context) -> Picked:
        """Draw one; takes one double unless there is a single candidate."""
        candidates.check_some_possible()
        terms = exp32(candidates.logits - candidates.logits.max())
        sums = np.add.accumulate(terms, dtype=np.float64)
        shown = candidates.with_probs((terms / sums[-1]).astype(np.float32))
        index = 0 if len(candidates) == 1 else first_reaching(sums, context.prng.next_double() * sums[-1], terms)
        return Picked(index=index, candidates=shown, pick=self)


def first_reaching(sums: np.ndarray[tuple[int], np.dtype[np.float64]], mass: float, terms: Float32s) -> int:
    """The first place whose running sum reaches a mass, and that has a mass of its own: a draw of 0 needs the second."""
    place = int(np.searchsorted(sums, mass, side="left"))
    return place if terms[place] > 0 else int(np.flatnonzero(terms[place:] > 0)[0]) + place


def draw_discrete(probs: Float32s, prng: Generator) -> int:
    """A place drawn by weights, as GNU's C++ library draws from a discrete distribution.

    Numerics: weights over their double sum, running sums in double, the last one exactly 1. A single weight takes no draw.
    Source: spec/samplers.md section 3.5.
    """
    if len(probs) < 2:
        return 0
    weights = probs.astype(np.float64)
    sums = np.add.accumulate(weights / np.add.accumulate(weights)[-1])
    sums[-1] = 1.0
    return first_reaching(sums, prng.next_double(), probs)
