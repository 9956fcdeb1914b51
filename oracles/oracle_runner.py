"""An oracle as a runner: cases in, traces out, each time in a process of its own; nothing is written as a golden.

Guarantees: what comes back is what the oracle's process wrote, as in a recording; a case that it refuses is an `OracleError`
with the oracle's own words. Many cases at once share a process, whose start takes seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from oracles.environment import ensure_environment
from oracles.process import Task, events
from oracles.registry import Oracle
from parity.case import Case
from parity.errors import OracleError
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.trace import Trace


@dataclass(kw_only=True)
class OracleRunner:
    """Runs cases on an oracle.

    Attributes:
        oracle: Which.
        environment_of: Interpreter of its environment, built where it is missing.
    """

    oracle: Oracle
    environment_of: Callable[[Oracle], Path] = field(default=ensure_environment)

    @property
    def name(self) -> str:
        """`mlx-lm 0.32.2`."""
        return f"{self.oracle.name} {self.oracle.version}"

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        """Run one case.

        Raises:
            OracleError: The oracle refuses it, or its process died.
        """
        return self.run_all([case], snapshot)[0]

    def run_all(self, cases: Sequence[Case], snapshot: Snapshot) -> list[Trace]:
        """Run cases in one process; a trace each, in their order.

        Raises:
            OracleError: The oracle refuses one of them, or its process died.
        """
        answers = self.run_each([(case, snapshot) for case in cases])
        for answer in answers:
            if isinstance(answer, OracleError):
                raise answer
        return [answer for answer in answers if isinstance(answer, Trace)]

    def run_each(self, asked: Sequence[tuple[Case, Snapshot]]) -> list[Trace | OracleError]:
        """Run cases of several snapshots in one process; for each its trace, or why there is none.

        Raises:
            OracleError: The process died.
        """
        with TemporaryDirectory(prefix="assay-explain-", ignore_cleanup_errors=True) as folder:
            tasks = [_task(case, i, snapshot, Path(folder)) for i, (case, snapshot) in enumerate(asked)]
            refused = self._do(tasks)
            return [
                self._refusal(case, refused[task.name]) if task.name in refused else Trace.load(task.out)
                for task, (case, _) in zip(tasks, asked, strict=True)
            ]

    def provenance(self) -> Provenance:
        """Not known from here: an oracle's process writes its own beside each trace."""
        raise NotImplementedError("an oracle's provenance comes with its traces")

    def _do(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Run tasks; the names of those that were refused, with the oracle's words."""
        finished: set[str] = set()
        refused: dict[str, str] = {}
        for event in events(self.oracle, self.environment_of(self.oracle), {0: tasks}):
            if event.kind == "finished" and event.case is not None:
                finished.add(event.case)
            elif event.kind == "failed" and event.case is not None:
                refused[event.case] = f"{event.facts['kind']}: {event.facts['message']}"
            elif event.kind == "ended" and len(finished) + len(refused) < len(tasks):
                raise OracleError(
                    f"the process of {self.name} died",
                    code=event.facts["code"],
                    said=event.facts["stderr"] or "nothing",
                    next_step=f"assay oracles sync {self.oracle.name}, and watch the memory",
                )
        return refused

    def _refusal(self, case: Case, reason: str) -> OracleError:
        return OracleError(
            f"{self.name} does not run {case.name}",
            reason=reason,
            next_step=f"assay record '{case.name}', which runs the case as it stands",
        )


def _task(case: Case, number: int, snapshot: Snapshot, folder: Path) -> Task:
    """A task under a name of its own: cases that are cut from one share its name."""
    named = replace(case, name=f"{case.name}/{number}")
    return Task(
        case=named.to_json(),
        snapshot={"name": snapshot.name, "path": str(snapshot.path.absolute())},
        out=folder / str(number),
    )
