"""Penalties on tokens of the recent past (repetition, frequency, presence), and logit bias.

Guarantees: one pass over the tokens of the window; a token that is not a candidate is passed over. Differs from mlx-lm: the
window holds accepted tokens alone, and a logit of exactly 0 is multiplied, which leaves it 0 either way.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from engine.errors import RequestError
from engine.llama_sampling.candidates import Candidates, Ids
from engine.llama_sampling.context import Context
from engine.llama_sampling.history import last_tokens
from engine.llama_sampling.options import check_number, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Repetition first, then frequency and presence together.

    Attributes:
        repeat: Divides positive logits and multiplies the others; 1 leaves them.
        frequency: Subtracted once per occurrence in the window.
        presence: Subtracted once where the token occurs at all.
        last_n: Tokens of the window; 0 turns penalties off, -1 takes the whole history.

    Numerics: float32, each operation rounded.
    Source: spec/samplers.md section 3.2.
    """

    repeat: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    last_n: int = 64

    def __post_init__(self) -> None:
        check_number("repeat penalty", self.repeat, low=float(np.finfo(np.float32).tiny))
        check_number("frequency penalty", self.frequency)
        check_number("presence penalty", self.presence)
        check_whole("penalty window", self.last_n, low=-1)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """The same candidates in the same order, flagged unsorted; as they were when off."""
        if self.last_n == 0 or (self.repeat, self.frequency, self.presence) == (1, 0, 0):
            return candidates
        counts = Counter(last_tokens(context.history, self.last_n))
        logits = candidates.logits.copy()
        places, tokens = places_of(candidates.ids, counts)
        hit = logits[places]
        repeat, frequency, presence = map(np.float32, (self.repeat, self.frequency, self.presence))
        hit = np.where(hit <= 0, hit * repeat, hit / repeat)
        times = np.array([counts[token] for token in tokens], dtype=np.float32)
        logits[places] = hit - (times * frequency + presence)
        return candidates.with_logits(logits, is_sorted=False)


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Adds a number to the logits of given ids.

    Attributes:
        bias: Id to number; -inf forbids an id.

    Numerics: one addition in float32.
    Source: spec/samplers.md section 3.2.
    """

    bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for token, value in self.bias.items():
            check_whole("biased id", token, low=0)
            if value != -np.inf:
                check_number(f"logit bias of {token}", value)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """The same candidates in the same order, flagged unsorted.

        Raises:
            RequestError: An id lies outside the vocabulary.
        """
        if not self.bias:
            return candidates
        if outside := [token for token in self.bias if token >= context.vocabulary]:
            raise RequestError(
                "logit bias names ids outside the vocabulary",
                ids=", ".join(map(str, outside[:5])),
                vocabulary=f"0 to {context.vocabulary - 1}",
                next_step="tokenise with the tokenizer of this snapshot",
            )
        logits = candidates.logits.copy()
        places, tokens = places_of(candidates.ids, self.bias)
        logits[places] += np.array([self.bias[token] for token in tokens], dtype=np.float32)
        return candidates.with_logits(logits, is_sorted=False)


def places_of(ids: Ids, tokens: Iterable[int]) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], list[int]]:
    """Where among `ids` the tokens stand, and the tokens in that order; those that stand nowhere are left out."""
    wanted = np.fromiter(tokens, dtype=np.int64)
    places = np.flatnonzero(np.isin(ids, wanted))
    return places, [int(token) for token in ids[places]]
