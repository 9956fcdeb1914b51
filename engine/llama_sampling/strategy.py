"""A chain of samplers and a pick: one call takes logits to a token.

Guarantees: the same logits, history, strategy and generator state give the same token; logits and history are never
modified. What a pick learns (mirostat) comes back as the strategy for the next token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy.typing as npt

from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.context import Context, Pick, Sampler
from engine.llama_sampling.draw import Dist, Greedy
from engine.llama_sampling.filters import MinP, TopK, TopP, TypicalP
from engine.llama_sampling.generators import Generator
from engine.llama_sampling.history import TokenHistoryTracker
from engine.llama_sampling.penalties import Penalties
from engine.llama_sampling.temperature import Temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingStrategy:
    """What is done to the candidates, in order, and how one of them is picked.

    Attributes:
        samplers: Applied from first to last.
        pick: Dist, Greedy, Mirostat or MirostatV2.
    """

    samplers: tuple[Sampler, ...] = ()
    pick: Pick = field(default_factory=Dist)

    @classmethod
    def lloyal(
        cls,
        *,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        penalties: Penalties | None = None,
    ) -> Self:
        """The persistent chain of liblloyal: penalties, top-k, typical, top-p, min-p, temperature, draw.

        A temperature of 0 or less leaves penalties and greedy alone.

        Source: spec/samplers.md section 3.1.
        """
        penalties = penalties or Penalties()
        if temperature <= 0:
            return cls(samplers=(penalties,), pick=Greedy())
        chain = (penalties, TopK(top_k), TypicalP(typical_p), TopP(top_p), MinP(min_p), Temperature(temperature))
        return cls(samplers=chain)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """One sampled token.

    Attributes:
        token_id: The token.
        candidates: What it was picked from, for sampling-level metrics.
        params: The strategy for the next token: as given, but for what its pick learned.
    """

    token_id: int
    candidates: Candidates
    params: SamplingStrategy


def sample_with_strategy(
    logits: npt.ArrayLike,
    *,
    token_history: Sequence[int] | TokenHistoryTracker = (),
    params: SamplingStrategy,
    prng: Generator,
    xtc_prng: Generator | None = None,
) -> Sampled:
    """Sample one token.

    Args:
        logits: [V], any float dtype; computed with in float32.
        token_history: Accepted tokens, oldest first.
        params: Chain and pick.
        prng: Moves by what the step draws.
        xtc_prng: Generator of XTC; `prng` where none is given. llama.cpp gives XTC one of its own.

    Raises:
        RequestError: The logits are not one row, hold NaN or +inf, or leave nothing to pick.
    """
    candidates = Candidates.from_logits(logits)
    history = token_history.tokens if isinstance(token_history, TokenHistoryTracker) else token_history
    context = Context(history=history, vocabulary=len(candidates), prng=prng, xtc_prng=xtc_prng or prng)
    for sampler in params.samplers:
        candidates = sampler.apply(candidates, context)
    picked = params.pick.pick(candidates, context)
    token_id = int(picked.candidates.ids[picked.index])
    return Sampled(token_id=token_id, candidates=picked.candidates, params=replace(params, pick=picked.pick))
