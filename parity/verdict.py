"""A verdict: what the judge says about one case, and how it is told to people and to programs.

Guarantees: `message` has the project's one form (what happened, aligned facts, the next command); `to_json` has exactly
the keys that `assay check --json` promises. A verdict never changes; a later step makes another from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from parity.case import Case
from parity.compare import TensorDiff
from parity.errors import lay_out
from parity.provenance import Provenance
from parity.row_difference import RowDifference


class Status(Enum):
    """What became of a case."""

    IDENTICAL = "IDENTICAL"
    DIFFERENT = "DIFFERENT"
    INCOMPARABLE = "INCOMPARABLE"
    MISSING_GOLDEN = "MISSING_GOLDEN"
    STALE_GOLDEN = "STALE_GOLDEN"
    KNOWN_DEVIATION = "KNOWN_DEVIATION"
    FIXED = "FIXED"
    MEASURED_OK = "MEASURED_OK"
    MEASURED_BAD = "MEASURED_BAD"
    ERROR = "ERROR"


PASSING: Final = frozenset({Status.IDENTICAL, Status.KNOWN_DEVIATION, Status.MEASURED_OK})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the judge says about one case.

    Attributes:
        name: Of the case, or of the golden that no case claims.
        status: Decides whether the gate passes.
        what: First line of the message.
        facts: Aligned lines of the message, in order.
        next_step: The next command; empty where nothing is to be done.
        case: None for a golden that no case claims and for an entry that matches no case.
        model_type: Of the snapshot's config, where the snapshot could be read.
        differing: Names of the tensors whose digests differ, in execution order.
        diffs: Those of them whose expected bits were at hand, compared element by element.
        first_step: Step of the first differing tensor, counted from 0 as in `logits/0`.
        earliest: Module path of the first recorded activation that differs.
        cause: `tie`, `rounding`, `logic` or `unknown` with its evidence, once someone has looked.
        rows: Of a difference, every row of logits on both sides, by step.
        judged: Provenance of the run that was judged, where one took place.
        believed: Provenance of the golden it was judged by.
    """

    name: str
    status: Status
    what: str
    facts: Mapping[str, object] = field(default_factory=dict)
    next_step: str = ""
    case: Case | None = None
    model_type: str | None = None
    differing: tuple[str, ...] = ()
    diffs: Mapping[str, TensorDiff] = field(default_factory=dict)
    first_step: int | None = None
    earliest: str | None = None
    cause: str | None = None
    rows: tuple[RowDifference, ...] = ()
    judged: Provenance | None = None
    believed: Provenance | None = None

    @property
    def passes(self) -> bool:
        """Whether the gate lets it through."""
        return self.status in PASSING

    def message(self) -> str:
        """What happened, aligned facts, the next command."""
        facts = dict(self.facts)
        if self.earliest is not None:
            facts["earliest"] = self.earliest
        if self.cause is not None:
            facts["cause"] = self.cause
        if self.next_step:
            facts["next"] = self.next_step
        return lay_out(self.what, facts)

    def to_json(self) -> dict[str, object]:
        """One row of `assay check --json`."""
        case = self.case
        return {
            "case": self.name,
            "status": self.status.value,
            "model_type": self.model_type,
            "kv": case and case.kv.name,
            "sampler": case and case.sampler,
            "dtype": case and case.dtype,
            "tier": case and case.tier,
            "oracle": case and case.oracle,
            "num_steps": case and case.num_steps,
            "first_step": self.first_step,
            "earliest": self.earliest,
            "cause": self.cause,
        }


def counts(verdicts: tuple[Verdict, ...]) -> dict[str, int]:
    """Verdicts by status, in the order of `Status`; only those that occur."""
    return {s.value: n for s in Status if (n := sum(v.status is s for v in verdicts))}
