"""DRY, "don't repeat yourself": a token that would lengthen a repetition is penalised, the more the longer it already is.

Guarantees: looks at the history alone, in time linear in its length. Sequence breakers are sequences of token ids here;
turning strings into them is the tokenizer's work. A single-token breaker is never penalised.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.errors import RequestError
from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.context import Context
from engine.llama_sampling.history import last_tokens
from engine.llama_sampling.options import check_number, check_whole
from engine.llama_sampling.penalties import places_of

LARGEST_LOG: Final = np.float32(88.7228391)  # log of the largest float32
SMALLEST_GROWTH: Final = np.float32(1.000001)  # below it a power cannot overflow within any history
LONGEST_TAIL: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DRY:
    """Subtracts multiplier · base^(length - allowed_length) from tokens that would continue a repetition.

    Attributes:
        multiplier: 0 turns the sampler off.
        base: Growth per token; below 1 turns the sampler off.
        allowed_length: Repetitions shorter than this are free.
        last_n: Tokens of the window; 0 turns the sampler off, -1 takes the whole history.
        breakers: Token sequences over which no repetition is followed.

    Numerics: the power and the product in double, rounded to float32 once; one subtraction in float32.
    Source: spec/samplers.md section 3.3.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_number("DRY multiplier", self.multiplier)
        check_number("DRY base", self.base)
        check_whole("DRY allowed length", self.allowed_length, low=0)
        check_whole("DRY window", self.last_n, low=-1)
        if bad := [breaker for breaker in self.breakers if not 1 <= len(breaker) <= LONGEST_TAIL + 1]:
            raise RequestError(
                "a DRY sequence breaker is empty or too long",
                tokens=len(bad[0]),
                range=f"1 to {LONGEST_TAIL + 1}",
                next_step="shorten it",
            )

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """The same candidates in the same order, flagged unsorted; as they were when off or nothing repeats."""
        if self.multiplier == 0 or self.base < 1 or self.last_n == 0:
            return candidates
        lengths = self.repeat_lengths(last_tokens(context.history, self.last_n))
        if not lengths:
            return candidates
        logits = candidates.logits.copy()
        places, tokens = places_of(candidates.ids, lengths)
        logits[places] -= np.array([self.penalty(lengths[token]) for token in tokens], dtype=np.float32)
        return candidates.with_logits(logits, is_sorted=False)

    def penalty(self, length: int) -> np.float32:
        """What is subtracted from a token that continues a repetition of `length` tokens."""
        base = np.float32(self.base)
        exponent = length - self.allowed_length
        if base > SMALLEST_GROWTH:
            exponent = min(exponent, int(LARGEST_LOG / np.float32(math.log(base))))
        return np.float32(float(np.float32(self.multiplier)) * float(base) ** exponent)

    def repeat_lengths(self, tokens: Sequence[int]) -> dict[int, int]:
        """The longest repetition that each token would continue, for those of at least the allowed length.

        Args:
            tokens: The window, oldest first.
        """
        if len(tokens) <= self.allowed_length:
            return {}
        newest_first = list(reversed(tokens))
        limit = self._repeat_limit(newest_first)
        if limit < self.allowed_length:
            return {}
        single = {breaker[0] for breaker in self.breakers if len(breaker) == 1}
        longest: dict[int, int] = {}
        for distance, common in enumerate(common_prefixes(newest_first)):
            length = min(common, limit)
            if distance == 0 or length < self.allowed_length:
                continue
            token = newest_first[distance - 1]  # it followed the earlier occurrence
            if token not in single:
                longest[token] = max(longest.get(token, 0), length)
        return longest

    def _repeat_limit(self, newest_first: Sequence[int]) -> int:
        """How far back a repetition may reach before it meets a breaker."""
        for distance in range(len(newest_first)):
            tails = [
                len(breaker) - 1
                for breaker in self.breakers
                if len(breaker) <= distance + 1
                and all(newest_first[distance - place] == token for place, token in enumerate(breaker))
            ]
            if tails:
                return distance - max(tails)
        return len(newest_first)


def common_prefixes(tokens: Sequence[int]) -> list[int]:
    """For each place, how many tokens from there on equal those from the start on (the Z function); 0 for the first place.

    Source: Gusfield, "Algorithms on Strings, Trees and Sequences", 1997, section 1.4.
    """
    lengths = [0] * len(tokens)
    left = right = 0  # the match that reaches furthest covers [left, right)
    for place in range(1, len(tokens)):
        length = min(lengths[place - left], right - place) if place < right else 0
        while place + length < len(tokens) and tokens[length] == tokens[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths
