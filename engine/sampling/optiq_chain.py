"""mlx-optiq's chain in its own engine: temperature first, then top-k, top-p, min-p, and a draw from probabilities.

It is another function than `chain.Chain`: filters see the logits after temperature, without normalisation, and the draw takes
the logarithm of a softmax to which a tiny number was added, so that a token which was ruled out keeps a chance of 1e-30. It is
by Gumbel noise also of a single row, from which mlx-lm's chain draws by walking the cumulative sum.

Guarantees: as in `engine.sampling.chain`.
Source: spec/oracles.md section 5; constants as mlx-optiq 0.7.7 has them.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.errors import RequestError
from engine.sampling import filters
from engine.sampling.categorical import draw
from engine.sampling.chain import Keys, check_temperature

LEAST_TEMPERATURE: Final = 1e-6
FLOOR: Final = 1e-30  # added to every probability


@dataclass(frozen=True, slots=True, kw_only=True)
class OptiqChain:
    """Options of the chain; the defaults are greedy.

    Attributes:
        temperature: Divides the logits before any filter; 0 is greedy.
        top_k: Active above 0; must be below the vocabulary.
        top_p: Active above 0 and below 1.
        min_p: Active above 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0

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
        if type(self.top_k) is not int or self.top_k < 0:
            raise RequestError(
                "top_k is out of range", given=repr(self.top_k), known="0 or more", next_step="use 0 to switch it off"
            )


def filtered(logits_BV: mx.array, chain: OptiqChain) -> mx.array:
    """Logits over temperature with the tokens ruled out that the filters rule out, [B, V].

    Raises:
        RequestError: `top_k` does not fit the vocabulary.

    Numerics: top-p takes exponentials of what is not normalised; they overflow for logits above 88 and the filter then keeps
        what ties with the largest.
    """
    out_BV = logits_BV / max(chain.temperature, LEAST_TEMPERATURE)
    if chain.top_k > 0:
        out_BV = filters.top_k(out_BV, chain.top_k)
    if 0 < chain.top_p < 1:
        out_BV = filters.top_p(out_BV, chain.top_p)
    if chain.min_p > 0:
        out_BV = filters.min_p(out_BV, chain.min_p)
    return out_BV


def sample(logits_BV: mx.array, chain: OptiqChain, keys: Keys) -> tuple[mx.array, Keys]:
    """Choose an id for each row of logits.

    Args:
        logits_BV: Logits [B, V], not log-probabilities.
        chain: Temperature and filters.
        keys: Where this token's key comes from; none is taken when greedy.

    Returns:
        Ids, uint32 [B], and the source of the next token's key.

    Raises:
        RequestError: `top_k` does not fit the vocabulary.

    Numerics: softmax, sum and logarithm round to the dtype of the logits.
    """
    if chain.temperature == 0:
        return mx.argmax(logits_BV, axis=-1), keys
    return draw_ready(ready(logits_BV, chain), keys)


def ready(logits_BV: mx.array, chain: OptiqChain) -> mx.array:
    """What is drawn from, at a temperature above 0: the same for every draw from equal rows.

    Raises:
        RequestError: `top_k` does not fit the vocabulary.
    """
    return mx.log(mx.softmax(filtered(logits_BV, chain), axis=-1) + FLOOR)


def draw_ready(ready_BV: mx.array, keys: Keys) -> tuple[mx.array, Keys]:
    """Draw with the next key; what `ready` gave is not changed. Ids, uint32 [B], and the source of the next token's key."""
    used, keys = keys.take(1)
    if ready_BV.shape[0] == 1:  # mlx-optiq draws from a vector, and mlx 0.32.4 adds Gumbel noise to one
        return draw(ready_BV[0], used[0])[None], keys
    return draw(ready_BV, used[0]), keys
