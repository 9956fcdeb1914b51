"""The most probable id of a row where the logits alone decide it, without the sum of all probabilities.

Greedy picking compares logits - logsumexp(logits), each difference rounded: rounding keeps the order and can make ties, which
the lowest id wins. Where the largest logit is ahead of all others by more than differences are rounded by, no tie can be,
whatever the sum is.

Numerics: logsumexp lies between the largest logit and log(V) above it, up to its own rounding, at most 1/2 where the largest is
    below `Bound.largest`. So with V below 2^20 the winner's difference is within 16 of zero, where numbers are at most 2^-20
    (float32), 2^-4 (bfloat16) or 2^-7 (float16) apart; two that are further apart than twice that are never rounded to one.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

MOST_IDS: Final = 2**20


@dataclass(frozen=True, slots=True)
class Bound:
    """When logits of a dtype decide.

    Attributes:
        largest: The magnitude below which the largest logit must be.
        lead: By which it must be ahead.
    """

    largest: float
    lead: float


BOUNDS: Final = {
    mx.float32: Bound(2.0**10, 2.0**-19),
    mx.bfloat16: Bound(2.0**7, 2.0**-3),
    mx.float16: Bound(2.0**9, 2.0**-6),
}


def clear_winner(logits_BV: mx.array) -> int | None:
    """The id in the first row that greedy picking takes; None where the logits alone do not decide."""
    bound = BOUNDS.get(logits_BV.dtype)
    if bound is None or logits_BV.shape[-1] >= MOST_IDS:
        return None
    row = np.asarray(logits_BV[0].astype(mx.float32))
    winner = int(row.argmax())
    most = row[winner]
    if not abs(most) < bound.largest:  # a NaN is the largest to argmax, and not small
        return None
    return winner if np.count_nonzero(row >= most - np.float32(bound.lead)) == 1 else None
