"""Why two runs differ, with the evidence: a tie, rounding, logic, or unknown.

Guarantees: a cause is a description and excuses nothing. `rounding` needs a float64 truth near which both sides lie, within the
bound that the truth measures; `logic` one side beyond it, or outputs that cannot be compared at all; `tie` two ids whose logits
are as near as the rounding of a row; whatever is not shown is `unknown`, with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from parity.distribution import top2_margin
from parity.localize import LOGITS, Place, incomparable, modules_of
from parity.sketch import top_ids
from parity.tensor import FLOATS, Tensor
from parity.trace import TOKEN_IDS, Trace, activation_name, logits_name
from parity.truth.model import Truth
from parity.truth.weights import NoTruthError

Kind = Literal["tie", "rounding", "logic", "unknown"]
TIE_ULPS: Final = 4  # of the largest logit: as near as this, without a truth, is called a tie
DIGITS: Final = {"F32": 24, "BF16": 8, "F16": 11, "F64": 53}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescore:
    """Both sides of one output against the truth.

    Attributes:
        module: Which output.
        oracle: How far the expected side is off, at most.
        engine: How far the actual side is off, at most.
        bound: How far an honest run may be off.
    """

    module: str
    oracle: float
    engine: float
    bound: float

    @property
    def wrong(self) -> tuple[str, ...]:
        """The sides beyond the bound; NaN is beyond it."""
        sides = (("oracle", self.oracle), ("engine", self.engine))
        return tuple(name for name, off in sides if not off <= self.bound)

    @property
    def excess(self) -> float:
        """The larger of the two departures in bounds."""
        return max(self.oracle, self.engine) / max(self.bound, float(np.finfo(np.float64).tiny))

    def described(self) -> str:
        """`float64 re-score of model.norm: oracle 3e-08 off, engine 4e-08 off, rounding bound 2e-07`."""
        return (
            f"float64 re-score of {self.module}: oracle {self.oracle:.2g} off, engine {self.engine:.2g} off, "
            f"rounding bound {self.bound:.2g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause and what it rests on.

    Attributes:
        kind: One of four.
        evidence: In words.
        side: `oracle` or `engine`, whichever is far off; None where neither or both are, or nobody knows.
        rescore: Numbers behind `rounding` and `logic`, where there is a truth.
        margin: Largest minus second largest expected logit at the first id that differs; None where none does.
    """

    kind: Kind
    evidence: str
    side: str | None = None
    rescore: Rescore | None = None
    margin: float | None = None

    def __str__(self) -> str:
        """As messages have it: `rounding (evidence)`."""
        return f"{self.kind} ({self.evidence})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A difference as one pair of traces shows it.

    Attributes:
        place: Where the traces part.
        expected: The oracle's trace.
        actual: The engine's.
        ids: Every id that was fed up to the row of the place's step.
    """

    place: Place
    expected: Trace
    actual: Trace
    ids: tuple[int, ...]


def cause_of(case: Sighting, origin: Sighting, truth: Truth | str) -> Cause:
    """Weigh the evidence.

    Args:
        case: The difference in the case itself.
        origin: Where it begins, by a shorter prompt; `case` again where that is the same. A fault that grows with the position
            may hide in the rounding there and show in the case.
        truth: Of the snapshot in the case's dtype, or why there is none.
    """
    flip = _flip(case.expected, case.actual)
    margin = None if flip is None else top2_margin(case.expected.logits(flip))
    if case.place.module == TOKEN_IDS:
        return _choice(case.expected.logits(case.place.step), case.expected, case.actual, case.place.step)
    if incomparable(origin.place):
        alone = origin.place.only_on
        side = f"{alone} side alone has it" if alone else "dtype or shape differ"
        evidence = f"outputs of {origin.place.module} cannot be compared: {side}"
        return Cause(kind="logic", evidence=evidence, margin=margin)
    scores: list[Rescore] = []
    why_not = ""
    for sighting in (origin,) if origin is case else (origin, case):
        found, why_not = _rescored(sighting, truth)
        scores += found
    if not scores:
        return _without_truth(case.expected, case.actual, flip, margin, why_not)
    return _by_scores(scores, margin, flip if flip == case.place.step else None)


def _by_scores(scores: Sequence[Rescore], margin: float | None, flip: int | None) -> Cause:
    """One side beyond a bound anywhere is logic; both and nowhere one, unknown; none, rounding, which may flip a near tie."""
    if logic := max((score for score in scores if len(score.wrong) == 1), key=lambda score: score.excess, default=None):
        return Cause(kind="logic", evidence=logic.described(), side=logic.wrong[0], rescore=logic, margin=margin)
    if neither := next((score for score in scores if score.wrong), None):
        evidence = f"{neither.described()}: the truth computes this in neither way"
        return Cause(kind="unknown", evidence=evidence, rescore=neither, margin=margin)
    row = scores[-1]
    if flip is not None and row.module == LOGITS and margin is not None and margin <= 2 * row.bound:
        evidence = f"top-2 margin {margin:.2g} at step {flip}; {row.described()}"
        return Cause(kind="tie", evidence=evidence, rescore=row, margin=margin)
    return Cause(kind="rounding", evidence=scores[0].described(), rescore=scores[0], margin=margin)


def _rescored(seen: Sighting, truth: Truth | str) -> tuple[list[Rescore], str]:
    """The outputs of the step that differ and that the truth has: the first two of them, then the row of logits."""
    if isinstance(truth, str):
        return [], truth
    place, expected, actual = seen.place, seen.expected, seen.actual
    try:
        found: list[Rescore] = []
        order = (*modules_of(expected, place.step), LOGITS)
        after = order[order.index(place.module) :] if place.module in order else order
        for module in after:
            if len(found) >= 2 and module != LOGITS:
                continue
            name = logits_name(place.step) if module == LOGITS else activation_name(place.step, module)
            want, got = expected.tensors.get(name), actual.tensors.get(name)
            if want is None or got is None or want.dtype not in FLOATS or want.shape != got.shape:
                continue
            if want.digest != got.digest and (score := _score(module, want, got, truth, seen.ids)):
                found.append(score)
    except NoTruthError as error:
        return [], str(error)
    return found, "no differing output of the step has a float64 truth"


def _score(module: str, want: Tensor, got: Tensor, truth: Truth, ids: Sequence[int]) -> Rescore | None:
    at = truth.at(ids, module)
    if at is None or at[0].shape != want.shape[1:]:
        return None  # some oracles put out heads before positions: another cut than the truth's
    value, bound = at
    off = [float(np.abs(tensor.values()[0] - value).max()) for tensor in (want, got)]
    return Rescore(module=module, oracle=off[0], engine=off[1], bound=bound)


def _choice(row: Tensor, expected: Trace, actual: Trace, step: int) -> Cause:
    """Rows agree and the ids that were picked from them do not."""
    margin = top2_margin(row)
    picked = f"from the same row the oracle picks {expected.token_ids[step]}, the engine {actual.token_ids[step]}"
    values = row.values().reshape(-1)
    apart = abs(float(values[expected.token_ids[step]] - values[actual.token_ids[step]]))
    if apart <= _ulps(row, TIE_ULPS):
        return Cause(kind="tie", evidence=f"{picked}; their logits are {apart:.2g} apart", margin=margin)
    best = int(top_ids(row, 1)[0])
    side = {expected.token_ids[step]: "engine", actual.token_ids[step]: "oracle"}.get(best)
    return Cause(kind="logic", evidence=f"{picked}; top-2 margin {margin:.2g}", side=side, margin=margin)


def _without_truth(expected: Trace, actual: Trace, flip: int | None, margin: float | None, why_not: str) -> Cause:
    if flip is not None and margin is not None:
        row = expected.logits(flip)
        if margin <= _ulps(row, TIE_ULPS) and TOKEN_IDS in actual.tensors:
            return Cause(kind="tie", evidence=f"top-2 margin {margin:.2g} at step {flip}; {why_not}", margin=margin)
    return Cause(kind="unknown", evidence=why_not, margin=margin)


def _flip(expected: Trace, actual: Trace) -> int | None:
    """The first step whose id differs."""
    pairs = enumerate(zip(expected.token_ids, actual.token_ids, strict=True))
    return next((step for step, (want, got) in pairs if want != got), None)


def _ulps(row: Tensor, count: int) -> float:
    """That many units in the last place of a row's largest magnitude."""
    largest = float(np.abs(row.values()).max())
    return count * float(np.ldexp(1.0, int(np.frexp(largest)[1]) - DIGITS[row.dtype]))
