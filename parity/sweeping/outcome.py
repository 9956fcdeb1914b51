"""What became of one equality: equal, different by so much, or refused.

Guarantees: equality is decided on unsigned views of the bits. How far apart the values are is told beside it, in ULPs and in
standard deviations of the expected values, and decides nothing. An exception that is no refusal counts as a difference.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import numpy as np

from parity.compare import Match, TensorDiff
from parity.sweeping.subject import Refused
from parity.tensor import Tensor

Verdict = Literal["equal", "different", "refused"]

ROUNDING: Final = {
    "F32": 1e-4,
    "F16": 0.02,
    "BF16": 0.1,
}  # of the standard deviation: paths that differ in order stay below
REFUSALS: Final = (Refused, NotImplementedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two tensors that must have the same bits."""

    label: str
    expected: Tensor
    actual: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to one equality.

    Attributes:
        verdict: `equal`, `different` or `refused`.
        where: Label of the first pair that differs.
        detail: Why it was refused, or what was raised; empty otherwise.
        max_ulp: Largest distance in ULPs over all pairs.
        size: Largest absolute difference over the standard deviation of the expected values; infinite where one is not finite.
        bound: Size up to which the dtype's order of sums explains a difference; 0 where nothing does.
    """

    verdict: Verdict
    where: str = ""
    detail: str = ""
    max_ulp: int | None = None
    size: float | None = None
    bound: float = 0.0

    @property
    def kind(self) -> str:
        """`equal`, `refused`, `rounding` (the order of sums explains it), `logic` or `raises`."""
        if self.verdict != "different":
            return self.verdict
        if self.size is None:
            return "raises" if self.detail else "logic"
        return "rounding" if self.size <= self.bound else "logic"

    def to_json(self) -> dict[str, Any]:
        """Plain values; an infinite size is the text `inf`."""
        size = "inf" if self.size is not None and math.isinf(self.size) else self.size
        return {
            "verdict": self.verdict,
            "kind": self.kind,
            "where": self.where,
            "detail": self.detail,
            "max_ulp": self.max_ulp,
            "size": size,
            "bound": self.bound,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        size = raw["size"]
        return cls(
            verdict=raw["verdict"],
            where=raw["where"],
            detail=raw["detail"],
            max_ulp=raw["max_ulp"],
            size=None if size is None else float(size),
            bound=raw["bound"],
        )


def outcome_of(pairs: Iterable[Pair]) -> Outcome:
    """Judge all pairs of one equality; computing them may refuse or raise.

    Raises:
        AssertionError: There was no pair, so nothing was asked.
    """
    try:
        outcome = _judged(iter(pairs))
    except REFUSALS as error:
        return Outcome(verdict="refused", detail=_said(error))
    except Exception as error:  # noqa: BLE001 - whatever an oracle raises is the finding
        return Outcome(verdict="different", where="raised", detail=_said(error))
    if outcome is None:
        raise AssertionError("an invariance compared nothing")
    return outcome


def _judged(pairs: Iterator[Pair]) -> Outcome | None:
    where, max_ulp, size, bound, count = "", 0, 0.0, 0.0, 0
    for pair in pairs:
        count += 1
        diff = TensorDiff.of(pair.expected, pair.actual)
        if diff.match is Match.IDENTICAL:
            continue
        where = where or pair.label
        if diff.match is Match.INCOMPARABLE:
            detail = f"{diff.expected_kind} became {diff.actual_kind}"
            return Outcome(verdict="different", where=where, detail=detail, size=math.inf)
        max_ulp = max(max_ulp, diff.max_ulp or 0)
        size, bound = max(size, _size(pair)), ROUNDING.get(pair.expected.dtype, 0.0)
    if count == 0:
        return None
    if not where:
        return Outcome(verdict="equal")
    return Outcome(verdict="different", where=where, max_ulp=max_ulp, size=size, bound=bound)


def _size(pair: Pair) -> float:
    """Largest difference in standard deviations of what was expected."""
    expected, actual = (np.asarray(t.values(), dtype=np.float64) for t in (pair.expected, pair.actual))
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)) or not np.array_equal(expected[~finite], actual[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    spread = float(expected[finite].std()) or 1.0
    return float(np.abs(expected[finite] - actual[finite]).max()) / spread


def _said(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:160]
    return first if isinstance(error, Refused) else f"{type(error).__name__}: {first}"
