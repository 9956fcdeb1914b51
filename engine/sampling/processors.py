"""Processors: what is done to logits before they become log-probabilities.

The order is fixed: logit bias, then repetition, presence and frequency penalty. Each penalty looks at the last tokens of the
history, which is the whole prompt and all tokens that were fed since.

Guarantees: pure; the input array is never modified; an option that is absent, and a penalty of 0, changes nothing.
Source: spec/samplers.md section 1.2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx

from engine.errors import RequestError

WINDOW: Final = 20  # tokens that a penalty looks back on, where nothing else is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """Options of the processors.

    Attributes:
        logit_bias: Token id to what is added to its logit.
        repetition_penalty: Logits of seen tokens are divided by it where they are 0 or more and multiplied where they are
            negative; 1 changes nothing.
        repetition_window: Tokens that it looks back on; 0 means all.
        presence_penalty: Subtracted once from the logit of a token that was seen; may be negative.
        presence_window: As above.
        frequency_penalty: Subtracted for every time that a token was seen; may be negative.
        frequency_window: As above.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 0.0
    repetition_window: int = WINDOW
    presence_penalty: float = 0.0
    presence_window: int = WINDOW
    frequency_penalty: float = 0.0
    frequency_window: int = WINDOW

    @property
    def looks_back(self) -> bool:
        """Whether what is done to a row depends on the history."""
        return any((self.repetition_penalty, self.presence_penalty, self.frequency_penalty))

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            RequestError: A bias is not id to number, a penalty is not finite, or repetition penalty or window is negative.
        """
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0 or not _is_number(bias):
                raise RequestError(
                    "logit_bias must be a dict of int to float",
                    entry=f"{token!r}: {bias!r}",
                    next_step="give ids and numbers",
                )
        for name in ("repetition", "presence", "frequency"):
            penalty, window = getattr(self, f"{name}_penalty"), getattr(self, f"{name}_window")
            if not _is_number(penalty) or not math.isfinite(penalty):
                raise RequestError(
                    f"{name}_penalty is not a number", given=repr(penalty), next_step="use 0 to switch it off"
                )
            if type(window) is not int or window < 0:
                raise RequestError(
                    f"{name}_window is not a number of tokens",
                    given=repr(window),
                    next_step="use 0 for the whole history",
                )
        if self.repetition_penalty < 0:
            raise RequestError(
                "repetition_penalty must be a non-negative float",
                given=self.repetition_penalty,
                next_step="1 changes nothing; above 1 discourages",
            )

    @property
    def active(self) -> bool:
        """Whether any option changes anything."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or any(penalty != 0 for penalty in penalties)


def process(logits_BV: mx.array, history: Sequence[int], options: Processing) -> mx.array:
    """Apply all processors that are asked for, in their order.

    Args:
        logits_BV: [B, V]; every row is given the same history.
        history: Prompt and fed tokens, oldest first; all below V.
        options: Which ones, and how strong.

    Returns:
        A new array, same dtype and shape.

    Raises:
        RequestError: A biased or a seen token lies outside the vocabulary.

    Numerics: biases and penalties are rounded to the dtype of the logits; each step rounds there. The frequency penalty is
        subtracted occurrence by occurrence.
    """
    vocabulary = logits_BV.shape[-1]
    if options.logit_bias:
        _check_inside(options.logit_bias, vocabulary, "logit_bias names tokens")
        logits_BV = bias(logits_BV, options.logit_bias)
    if history:
        _check_inside(history, vocabulary, "the history holds tokens")
        if options.repetition_penalty != 0:
            seen = window(history, options.repetition_window)
            logits_BV = repetition(logits_BV, seen, options.repetition_penalty)
        if options.presence_penalty != 0:
            logits_BV = presence(logits_BV, window(history, options.presence_window), options.presence_penalty)
        if options.frequency_penalty != 0:
            logits_BV = frequency(logits_BV, window(history, options.frequency_window), options.frequency_penalty)
    return logits_BV


def window(history: Sequence[int], size: int) -> Sequence[int]:
    """The last `size` tokens, or all of them where `size` is 0."""
    return history[-size:] if size else history


def bias(logits_BV: mx.array, biases: Mapping[int, float]) -> mx.array:
    """Add a number to the logits of some tokens."""
    return logits_BV.at[:, mx.array(list(biases))].add(mx.array(list(biases.values())))


def repetition(logits_BV: mx.array, seen: Sequence[int], penalty: float) -> mx.array:
    """Divide the logits of seen tokens by the penalty, or multiply those that are negative; once however often seen."""
    ids = mx.array(sorted(set(seen)))
    at_BS = logits_BV[:, ids]
    return _with(logits_BV, ids, mx.where(at_BS < 0, at_BS * penalty, at_BS / penalty))


def presence(logits_BV: mx.array, seen: Sequence[int], penalty: float) -> mx.array:
    """Subtract the penalty from the logits of seen tokens; once however often seen."""
    ids = mx.array(sorted(set(seen)))
    return _with(logits_BV, ids, logits_BV[:, ids] - penalty)


def frequency(logits_BV: mx.array, seen: Sequence[int], penalty: float) -> mx.array:
    """Subtract the penalty from the logits of seen tokens, as often as they were seen."""
    return logits_BV.at[:, mx.array(list(seen))].subtract(penalty)


def _with(logits_BV: mx.array, ids: mx.array, values_BS: mx.array) -> mx.array:
    """A copy with other values at some ids."""
    copy_BV = mx.array(logits_BV)
    copy_BV[:, ids] = values_BS
    return copy_BV


def _check_inside(ids: Sequence[int] | Mapping[int, float], vocabulary: int, subject: str) -> None:
    """Refuse ids that the logits do not have: mlx would write past their end without a word."""
    if outside := [token for token in ids if not 0 <= token < vocabulary]:
        raise RequestError(
            f"{subject} outside the vocabulary",
            ids=", ".join(map(str, outside[:5])),
            vocabulary=f"0 to {vocabulary - 1}",
            next_step="tokenise with the tokenizer of this snapshot",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
