"""Which cases a pattern chooses where some snapshots are opt-in.

A snapshot is opt-in if the catalogue gives terms of use for it. Its cases run only if the pattern's first part is the
snapshot's own name (`gemma3-270m/*`): no pattern at all, and a glob that merely happens to match, leave them out, and what is
left out is said. So nobody meets terms of use, or a download of that kind, without asking for it; and what a request covers
depends on the request alone, never on what lies on the machine.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from parity.case import Case
from parity.errors import UsageError
from parity.matrix import select
from parity.models.catalogue import entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a pattern chooses.

    Attributes:
        cases: To be run, in their order.
        left_out: Cases that match, but are of opt-in snapshots that the pattern does not name.
    """

    cases: tuple[Case, ...]
    left_out: tuple[Case, ...] = ()

    @property
    def line(self) -> str | None:
        """What is said of cases that were left out, if any were."""
        if not self.left_out:
            return None
        names = list(dict.fromkeys(case.snapshot for case in self.left_out))
        count = f"{len(self.left_out)} {'case' if len(self.left_out) == 1 else 'cases'}"
        return f"left out: {count} of {', '.join(names)} (opt-in: '{names[0]}/*' chooses them)"


def opt_in_snapshots() -> frozenset[str]:
    """Names of the known snapshots that have terms of use."""
    return frozenset(entry.name for entry in entries().values() if entry.terms is not None)


def choose(cases: Iterable[Case], pattern: str | None) -> Chosen:
    """The cases that a pattern chooses, and those that it would choose if they were not opt-in.

    Raises:
        UsageError: None matches, or only such that are left out.
    """
    matching = select(cases, pattern)
    named = (pattern or "").split("/", 1)[0]
    opt_in = opt_in_snapshots() - {named}
    chosen = Chosen(
        cases=tuple(case for case in matching if case.snapshot not in opt_in),
        left_out=tuple(case for case in matching if case.snapshot in opt_in),
    )
    if not chosen.cases:
        raise UsageError(
            f"only opt-in cases match {pattern!r}" if pattern else "there are only opt-in cases",
            cases="\n".join(case.name for case in chosen.left_out[:5]),
            next_step=f"name the snapshot: '{chosen.left_out[0].snapshot}/*'",
        )
    return chosen
