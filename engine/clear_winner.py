"""The most probable id of a row where the logits alone decide it, without the sum of all probabilities.

Greedy picking compares logits - logsumexp(logits), each difference rounded: rounding keeps the order and can make ties, which
the lowest id wins. Where the logits are float32 and the largest is ahead of all others by more than differences are rounded
by, no tie can be, whatever the sum is.

Numerics: logsumexp lies between the largest logit and log(V) above it, up to an error far below 1 where the largest is below
    2^10. So with V below 2^20 the winner's difference is within 16 of zero, where float32 numbers are at most 2^-20 apart; two
    numbers further apart than that are never rounded to one.
"""

from typing import Final

import mlx.core as mx
import numpy as np

LARGEST: Final = 2.0**10
LEAD: Final = np.float32(2.0**-19)
MOST_IDS: Final = 2**20


def clear_winner(logits_BV: mx.array) -> int | None:
    """The id in the first row that greedy picking takes; None where the logits alone do not decide."""
    if logits_BV.dtype != mx.float32 or logits_BV.shape[-1] >= MOST_IDS:
        return None
    row = np.asarray(logits_BV)[0]
    winner = int(row.argmax())
    most = row[winner]
    if (
        not abs(most) < LARGEST or np.count_nonzero(row >= most - LEAD) != 1
    ):  # NaN is the largest to argmax, and not small
        return None
    return winner
