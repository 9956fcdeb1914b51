from collections.abc import Sequence

import numpy as np
import pytest

from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.context import Context, Sampler
from engine.llama_sampling.generators import Mt19937


class Script:
    """A generator that gives what it is told."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def next_double(self) -> float:
        return self.numbers.pop(0)

    def next_float(self) -> np.float32:
        return np.float32(self.numbers.pop(0))

    def clone(self) -> "Script":
        return Script(*self.numbers)


class Bench:
    """Samplers on probabilities, as published vectors have them."""

    Script = Script

    def context(
        self, history: Sequence[int] = (), *, vocabulary: int = 0, seed: int = 0, script: Script | None = None
    ) -> Context:
        return Context(
            history=history, vocabulary=vocabulary, prng=script or Mt19937(seed), xtc_prng=script or Mt19937(seed)
        )

    def of_probs(self, probs: Sequence[float]) -> Candidates:
        return Candidates.from_logits(np.log(np.array(probs)))

    def apply(
        self, sampler: Sampler, candidates: Candidates, history: Sequence[int] = (), **options: int
    ) -> Candidates:
        return sampler.apply(candidates, self.context(history, vocabulary=len(candidates), **options))

    def probs(self, candidates: Candidates) -> list[float]:
        fresh = candidates.softmaxed().probs
        assert fresh is not None
        return fresh.tolist()

    def descending(
        self, sampler: Sampler, probs: Sequence[float], history: Sequence[int] = (), **options: int
    ) -> list[float]:
        return sorted(self.probs(self.apply(sampler, self.of_probs(probs), history, **options)), reverse=True)


@pytest.fixture
def bench() -> Bench:
    return Bench()
