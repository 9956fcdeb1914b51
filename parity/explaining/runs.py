"""Running several cases on one runner: all at once where the runner can, one by one elsewhere."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from parity.case import Case
from parity.snapshot import Snapshot
from parity.trace import Runner, Trace


@runtime_checkable
class RunsMany(Protocol):
    """A runner to which many cases at once are cheaper: an oracle's process takes seconds to start."""

    def run_all(self, cases: Sequence[Case], snapshot: Snapshot) -> list[Trace]:
        """Run cases; a trace each, in their order."""
        ...


def run_all(runner: Runner, cases: Sequence[Case], snapshot: Snapshot) -> list[Trace]:
    """Run cases; a trace each, in their order."""
    if isinstance(runner, RunsMany):
        return runner.run_all(cases, snapshot)
    return [runner.run(case, snapshot) for case in cases]
