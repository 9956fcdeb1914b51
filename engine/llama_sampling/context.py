"""What a sampler may look at beside its candidates, and the shape of samplers and picks.

Guarantees: a sampler is a value; what it needs of the past comes in here, and what it leaves behind comes out of `pick`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.generators import Generator


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """The surroundings of one step.

    Attributes:
        history: Accepted tokens, oldest first.
        vocabulary: V, the number of logits before any filter.
        prng: Of the final draw.
        xtc_prng: Of XTC. llama.cpp gives each sampler that draws a generator of its own.
    """

    history: Sequence[int]
    vocabulary: int
    prng: Generator
    xtc_prng: Generator


class Sampler(Protocol):
    """Narrows or reweighs candidates."""

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """New candidates; the old ones stay as they are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picked:
    """What a pick gives.

    Attributes:
        index: Place among `candidates`.
        candidates: Those that could have been picked, with their probabilities where the pick computed them.
        pick: The pick to use for the next token.
    """

    index: int
    candidates: Candidates
    pick: "Pick"


class Pick(Protocol):
    """Ends a chain: chooses one candidate."""

    def pick(self, candidates: Candidates, context: Context) -> Picked:
        """Choose one."""
        ...
