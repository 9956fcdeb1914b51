"""One row of logits on both sides of a difference: how far apart, and what each side holds likeliest.

Guarantees: float64, from stored bits; a figure that needs bits which are not at hand is None, never guessed: where a golden
commits a sketch alone, the expected top comes from the sketch and there is no KL. These rows describe; they decide nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from parity.compare import TensorDiff
from parity.distribution import RowDistance, log_softmax
from parity.sketch import top_ids
from parity.tensor import Tensor

SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A token and its natural log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDifference:
    """Row `step` of logits on both sides.

    Attributes:
        step: Counted from 0, as in `logits/0`.
        num_different: Elements whose bits differ; None where the expected row is not at hand.
        max_ulp: Largest distance; 0 where nothing differs, None where it is not known.
        kl: KL(expected || actual) in nats; 0 where nothing differs, None where it is not known.
        flips: How many of the `SHOWN` likeliest expected ids are not among the likeliest actual ones.
        margin: Largest minus second largest expected logit.
        expected_top: The likeliest ids of the oracle's row, likeliest first; empty where it is not at hand.
        actual_top: Likewise of the engine's.
    """

    step: int
    num_different: int | None
    max_ulp: int | None
    kl: float | None
    flips: int | None
    margin: float | None
    expected_top: tuple[Scored, ...]
    actual_top: tuple[Scored, ...]

    @classmethod
    def of(cls, step: int, expected: Tensor, actual: Tensor) -> "RowDifference":
        """Describe two rows [1, V] of the same dtype and V."""
        diff = TensorDiff.of(expected, actual)
        distance = RowDistance.of(expected, actual, SHOWN)
        return cls(
            step=step,
            num_different=diff.num_different,
            max_ulp=diff.max_ulp if diff.num_different else 0,
            kl=distance.kl if diff.num_different else 0.0,
            flips=distance.flips,
            margin=distance.margin,
            expected_top=likeliest(expected),
            actual_top=likeliest(actual),
        )

    @classmethod
    def against_sketch(cls, step: int, sampled: Mapping[str, Tensor], actual: Tensor) -> "RowDifference":
        """Describe an engine's row that differs from one of which a sketch alone is at hand."""
        values = sampled["top_values"].values()[step]
        total = float(sampled["logsumexp"].values()[step])
        ids = sampled["top_ids"].values()[step].astype(np.int64)
        expected = tuple(
            Scored(token_id=int(i), logprob=float(v) - total) for i, v in zip(ids[:SHOWN], values[:SHOWN], strict=True)
        )
        found = likeliest(actual)
        gone = {one.token_id for one in expected} - {one.token_id for one in found}
        return cls(
            step=step,
            num_different=None,
            max_ulp=None,
            kl=None,
            flips=len(gone),
            margin=float(values[0] - values[1]),
            expected_top=expected,
            actual_top=found,
        )

    def to_json(self) -> dict[str, object]:
        """Plain values; numbers that JSON has no word for as text (`inf`, `nan`)."""
        return {
            "step": self.step,
            "num_different": self.num_different,
            "max_ulp": self.max_ulp,
            "kl": finite(self.kl),
            "flips": self.flips,
            "margin": finite(self.margin),
            "expected_top": [[one.token_id, finite(one.logprob)] for one in self.expected_top],
            "actual_top": [[one.token_id, finite(one.logprob)] for one in self.actual_top],
        }


def likeliest(row: Tensor, count: int = SHOWN) -> tuple[Scored, ...]:
    """The `count` likeliest ids of a row [1, V] with their log-probabilities, the lower id first on a tie."""
    logs = log_softmax(row)
    return tuple(Scored(token_id=int(i), logprob=float(logs[i])) for i in top_ids(row, count))


def finite(value: float | None) -> float | str | None:
    """The value, or its name where JSON has no number for it."""
    return value if value is None or np.isfinite(value) else str(float(value))
