"""mlx-lm's chain: top-p, min-p, XTC, top-k, then temperature and the draw.

Filters see the log-probabilities before temperature; each sees what the one before it left. Temperature 0 is greedy: the
most probable id, the lowest on a tie, and no filter is looked at.

Guarantees: options are checked when they are made, the vocabulary when it is known; ids follow from rows, options and keys
alone; input arrays are never modified.
Source: spec/samplers.md section 1.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from engine.errors import RequestError
from engine.sampling import filters
from engine.sampling.categorical import draw
from engine.sampling.keys import KeySource

Keys = TypeVar("Keys", bound=KeySource)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Options of the chain; the defaults are greedy.

    Attributes:
        temperature: Divides the log-probabilities before the draw; 0 is greedy.
        top_p: Active above 0 and below 1.
        top_p_rule: Which of mlx-lm's two definitions (`filters.top_p`).
        min_p: Active above 0.
        min_tokens_to_keep: Of min-p alone.
        xtc_probability: Active above 0.
        xtc_threshold: 0 to 0.5.
        xtc_special: Ids that XTC never excludes.
        top_k: Active above 0; must be below the vocabulary.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    top_p_rule: filters.TopPRule = "mass-above"
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special: Sequence[int] = ()
    top_k: int = 0

    def __post_init__(self) -> None:
        """Refuse options that are out of range.

        Raises:
            RequestError: One is.
        """
        check_temperature(self.temperature)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise RequestError(
                    f"{name} is out of range", given=value, known="0 to 1", next_step="use 0 to switch it off"
                )
        if self.top_p_rule not in filters.TOP_P_RULES:
            raise RequestError(
                "unknown rule for top_p",
                given=repr(self.top_p_rule),
                known=", ".join(filters.TOP_P_RULES),
                next_step="choose one of these",
            )
        filters.checked_keep(self.min_tokens_to_keep)
        filters.check_xtc(self.xtc_probability, self.xtc_threshold)
        if type(self.top_k) is not int or self.top_k < 0:
            raise RequestError(
                "top_k is out of range", given=repr(self.top_k), known="0 or more", next_step="use 0 to switch it off"
            )

    @property
    def num_keys(self) -> int:
        """Random keys that one token needs: one for the draw, one more for XTC, none when greedy."""
        return 0 if self.temperature == 0 else 1 + (self.xtc_probability > 0)


def filtered(logprobs_BV: mx.array, chain: Chain, xtc_uniform: mx.array | None = None) -> mx.array:
    """Rows with every token ruled out that the chain's filters rule out, before temperature.

    Args:
        logprobs_BV: Log-probabilities [B, V].
        chain: Its temperature is not looked at.
        xtc_uniform: A scalar in [0, 1), needed where XTC is active.

    Raises:
        RequestError: `top_k` or `min_tokens_to_keep` does not fit the vocabulary.
        ValueError: XTC is active and has no uniform.
    """
    if 0 < chain.top_p < 1:
        logprobs_BV = filters.top_p(logprobs_BV, chain.top_p, rule=chain.top_p_rule)
    if chain.min_p > 0:
        logprobs_BV = filters.min_p(logprobs_BV, chain.min_p, keep=chain.min_tokens_to_keep)
    if chain.xtc_probability > 0:
        if xtc_uniform is None:
            raise ValueError("XTC needs a uniform")
        logprobs_BV = filters.xtc(
            logprobs_BV,
            xtc_uniform,
            probability=chain.xtc_probability,
            threshold=chain.xtc_threshold,
            special=chain.xtc_special,
        )
    if chain.top_k > 0:
        logprobs_BV = filters.top_k(logprobs_BV, chain.top_k)
    return logprobs_BV


def sample(logprobs_BV: mx.array, chain: Chain, keys: Keys) -> tuple[mx.array, Keys]:
    """Choose an id for each row.

    Args:
        logprobs_BV: Log-probabilities [B, V] (`rows.log_probabilities`).
        chain: Filters and temperature.
        keys: Where the keys of this token come from; none is taken when greedy.

    Returns:
        Ids, uint32 [B], and the source of the next token's keys.

    Raises:
        RequestError: `top_k` or `min_tokens_to_keep` does not fit the vocabulary.

    Numerics: multiplied by the reciprocal of the temperature, which is rounded to the dtype of the rows; not divided.
    """
    if chain.temperature == 0:
        return mx.argmax(logprobs_BV, axis=-1), keys
    if chain.xtc_probability == 0:
        return draw_ready(ready(logprobs_BV, chain), keys)
    used, keys = keys.take(chain.num_keys)
    kept_BV = filtered(logprobs_BV, chain, mx.random.uniform(key=used[0]))
    return draw(kept_BV * (1 / chain.temperature), used[-1]), keys


def ready(logprobs_BV: mx.array, chain: Chain) -> mx.array:
    """What is drawn from, of a chain without XTC: the same for every draw from equal rows.

    Args:
        logprobs_BV: Log-probabilities [B, V].
        chain: Filters, and a temperature above 0.

    Raises:
        RequestError: `top_k` or `min_tokens_to_keep` does not fit the vocabulary.
    """
    return filtered(logprobs_BV, chain) * (1 / chain.temperature)


def draw_ready(ready_BV: mx.array, keys: Keys) -> tuple[mx.array, Keys]:
    """Draw with the next key; what `ready` gave is not changed. Ids, uint32 [B], and the source of the next token's key."""
    used, keys = keys.take(1)
    return draw(ready_BV, used[0]), keys


def check_temperature(temperature: float) -> None:
    """Refuse what is no temperature.

    Raises:
        RequestError: It is negative, infinite or not a number.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise RequestError(
            "temperature is out of range", given=temperature, known="0 or more", next_step="use 0 for greedy"
        )
