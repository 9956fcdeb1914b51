"""What a difference between two rows of logits does to the distribution: KL divergence, flips, margins.

Guarantees: float64 throughout; every function reads two rows and returns a number. These numbers describe a difference.
None of them decides a verdict: only bits do.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from parity.sketch import top_ids
from parity.tensor import Tensor

TOP_K: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDistance:
    """How far one row of logits is from another.

    Attributes:
        kl: KL(expected || actual) in nats.
        expected_top: Most likely id of `expected`, the lower one on a tie.
        actual_top: Likewise of `actual`.
        flips: How many of the `k` likeliest ids of `expected` are not among those of `actual`.
        k: As asked, at most V.
        margin: Largest minus second largest expected logit; 0 is a tie.
    """

    kl: float
    expected_top: int
    actual_top: int
    flips: int
    k: int
    margin: float

    @classmethod
    def of(cls, expected: Tensor, actual: Tensor, k: int = TOP_K) -> Self:
        """Compare two rows [1, V] or [V] of the same V."""
        k = min(k, expected.values().size)
        return cls(
            kl=kl_divergence(expected, actual),
            expected_top=int(top_ids(expected, 1)[0]),
            actual_top=int(top_ids(actual, 1)[0]),
            flips=top_k_flips(expected, actual, k),
            k=k,
            margin=top2_margin(expected),
        )

    @property
    def top1_agrees(self) -> bool:
        """Whether greedy decoding takes the same id."""
        return self.expected_top == self.actual_top

    def described(self) -> str:
        """`top-1 agrees, margin 0.84` or `top-1 flips from 7 to 41, margin 0.002`."""
        return top1_described(self.expected_top, self.actual_top, self.margin)


def kl_divergence(expected: Tensor, actual: Tensor) -> float:
    """KL(softmax(expected) || softmax(actual)) in nats.

    Infinite where `actual` rules out what `expected` allows; NaN where a row holds NaN or +inf.
    """
    log_p, log_q = log_softmax(expected), log_softmax(actual)
    if np.isnan(log_p).any() or np.isnan(log_q).any():
        return float("nan")
    p = np.exp(log_p)
    likely = p > 0
    return max(0.0, float(np.sum(p[likely] * (log_p[likely] - log_q[likely]))))


def top_k_flips(expected: Tensor, actual: Tensor, k: int) -> int:
    """How many of the `k` likeliest ids of `expected` are not among the `k` likeliest of `actual`."""
    return len(set(top_ids(expected, k).tolist()) - set(top_ids(actual, k).tolist()))


def top1_agreement(expected: list[Tensor], actual: list[Tensor]) -> float:
    """Share of rows whose most likely id is the same, from 0 to 1.

    Raises:
        ValueError: No rows, or not as many on both sides.
    """
    if not expected:
        raise ValueError("no rows to compare")
    same = [top_ids(e, 1)[0] == top_ids(a, 1)[0] for e, a in zip(expected, actual, strict=True)]
    return sum(map(bool, same)) / len(same)


def top2_margin(row: Tensor) -> float:
    """Largest minus second largest logit: how much greedy decoding can bear; inf where there is no second."""
    values = np.sort(row.values().reshape(-1))
    if values.size < 2:
        return float("inf")
    return 0.0 if values[-1] == values[-2] else float(values[-1] - values[-2])


def log_softmax(row: Tensor) -> npt.NDArray[np.float64]:
    """Log-probabilities [V] of a row; all NaN where the row holds NaN or +inf, or -inf alone."""
    values = row.values().reshape(-1)
    top = values.max()
    if not np.isfinite(top):
        return np.full_like(values, np.nan)
    shifted = values - top
    logs: npt.NDArray[np.float64] = shifted - np.log(np.sum(np.exp(shifted)))
    return logs


def top1_described(expected_top: int, actual_top: int, margin: float) -> str:
    """How greedy decoding fares, in words."""
    verb = "agrees" if expected_top == actual_top else f"flips from {expected_top} to {actual_top}"
    return f"top-1 {verb}, margin {margin:.2g}"
