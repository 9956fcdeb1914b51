"""Recording: run oracles on cases and write what they answer as goldens.

Guarantees: nothing but an accepted trace of an oracle's process becomes a golden, and no bits that a golden lists change
unexplained. A recording may be killed at any moment: finished traces are kept and found again, goldens appear whole or not
at all. One that ends leaves nothing behind, so that the next starts from nothing. A failure costs only its own case.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from oracles import journal as journals
from oracles.acceptance import accept
from oracles.batches import split
from oracles.environment import ensure_environment
from oracles.known_bits import history_of
from oracles.process import Event, Task, events
from oracles.recording_lock import recording_lock
from oracles.registry import Oracle, find_oracle
from oracles.unused import find_unused, sweep_partial
from parity import row_store
from parity.case import Case
from parity.errors import AssayError, OracleError
from parity.golden import GOLDENS, Golden, golden_path
from parity.snapshot import NO_MODEL, Snapshot

Status = Literal["new", "unchanged", "changed", "refused", "failed"]
Place = dict[str, Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What became of one case.

    Attributes:
        case: Its name.
        status: `new`, `unchanged` (byte-identical), `changed` (with an explanation in the history), `refused` (the bits would
            change unexplained; nothing written) or `failed` (no usable trace; nothing written).
        resumed: Whether the trace was kept from a recording that was interrupted.
        error: Why, for the last two statuses.
    """

    case: str
    status: Status
    resumed: bool = False
    error: AssayError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a recording did.

    Attributes:
        results: One a case, in the order of the cases.
        unused: Goldens of these oracles and this platform that no case claims.
    """

    results: tuple[Recorded, ...]
    unused: tuple[Path, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every case has its golden."""
        return all(result.status not in ("refused", "failed") for result in self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Where a recording gets what it needs; tests put their own in.

    Attributes:
        snapshot_of: Snapshot of a name, built or fetched.
        oracle_of: Oracle of a name.
        environment_of: Interpreter of an oracle's environment, built where it is missing.
    """

    snapshot_of: Callable[[str], Snapshot]
    oracle_of: Callable[[str], Oracle] = find_oracle
    environment_of: Callable[[Oracle], Path] = field(default=ensure_environment)


def record(
    cases: Sequence[Case],
    *,
    workshop: Workshop,
    all_cases: Sequence[Case] | None = None,
    root: Path = GOLDENS,
    into: Path | None = None,
    jobs: int = 1,
    reason: str | None = None,
    fresh: bool = False,
    on_result: Callable[[Recorded], None] = lambda _result: None,
    on_line: Callable[[str], None] = lambda _line: None,
) -> Recording:
    """Record cases and write their goldens.

    Args:
        cases: What to record.
        workshop: Where snapshots, oracles and environments come from.
        all_cases: Every case that exists, for the list of unused goldens; `cases` when absent.
        root: The goldens folder whose bits and history are answered to.
        into: Another folder to write to; `root` stays untouched.
        jobs: Oracle processes at a time.
        reason: Why bits may change; goes into the history of those that do.
        fresh: Ignore what an interrupted recording kept.
        on_result: Told each result as it becomes certain.
        on_line: Told in a line each what other long work is being done.

    Raises:
        OracleError: Another recording holds the folder, or an environment cannot be built.
        SnapshotError: A snapshot cannot be had.
    """
    journal = journals.Journal.of(into or root)
    with recording_lock(journal.folder):
        oracles = {name: workshop.oracle_of(name) for name in dict.fromkeys(case.oracle for case in cases)}
        sweep_partial(oracles.values(), into or root)
        named = dict.fromkeys(case.snapshot for case in cases)
        snapshots = {name: NO_MODEL if name == NO_MODEL.name else workshop.snapshot_of(name) for name in named}
        places = _places(cases, snapshots, oracles, journal)
        if fresh:
            journal.forget(places.values())
        desk = _Desk(snapshots=snapshots, oracles=oracles, root=root, into=into, reason=reason)
        results: dict[str, Recorded] = {}

        def settle(result: Recorded) -> None:
            results[result.case] = result
            on_result(result)

        remaining: list[Case] = []
        for case in cases:
            kept = journal.read(places[case.name])
            if kept is None:
                remaining.append(case)
            else:
                on_line(f"{case.name}: finished before the interruption")
                settle(desk.write(case, places[case.name], resumed=True))
        for oracle in oracles.values():
            mine = [case for case in remaining if case.oracle == oracle.name]
            if mine:
                python = workshop.environment_of(oracle)
                for result in _run(mine, oracle, python, snapshots, places, jobs=jobs, desk=desk):
                    settle(result)
        journal.forget(places.values())
        unused = () if into else find_unused(oracles.values(), all_cases if all_cases is not None else cases, root)
        return Recording(results=tuple(results[case.name] for case in cases), unused=unused)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Desk:
    """Turns a finished trace into a golden on disk."""

    snapshots: Mapping[str, Snapshot]
    oracles: Mapping[str, Oracle]
    root: Path
    into: Path | None
    reason: str | None

    def write(self, case: Case, place: Path, *, resumed: bool = False) -> Recorded:
        """Accept, compare with what is committed, write."""
        oracle, snapshot = self.oracles[case.oracle], self.snapshots[case.snapshot]
        kept = journals.Journal.read(place)
        if kept is None:
            return failed(case.name, oracle, "Missing", "the process said finished and left no readable trace")
        trace, provenance = kept
        try:
            accept(case, trace, provenance, oracle)
            history = history_of(
                case,
                trace,
                oracle=oracle,
                provenance=provenance,
                snapshot=snapshot,
                root=self.root,
                reason=self.reason,
            )
        except OracleError as error:
            return Recorded(case=case.name, status="failed", resumed=resumed, error=error)
        except AssayError as error:
            return Recorded(case=case.name, status="refused", resumed=resumed, error=error)
        golden = Golden.of(case, trace, snapshot_files=snapshot.logit_files, provenance=provenance, history=history)
        committed = golden_path(case, version=oracle.version, root=self.root)
        status: Status = "new"
        if committed.exists():
            status = "unchanged" if committed.read_bytes() == golden.manifest().encode() else "changed"
        golden.save(golden_path(case, version=oracle.version, root=self.into or self.root))
        if golden.form == "sketch" and self.into is None:
            row_store.save(case, oracle.version, trace.tensors)
        return Recorded(case=case.name, status=status, resumed=resumed)


def _places(
    cases: Sequence[Case],
    snapshots: Mapping[str, Snapshot],
    oracles: Mapping[str, Oracle],
    journal: journals.Journal,
) -> Place:
    sources = {name: oracle.source_digest for name, oracle in oracles.items()}
    return {
        case.name: journal.place(case, snapshots[case.snapshot], oracles[case.oracle], sources[case.oracle])
        for case in cases
    }


def _run(
    cases: Sequence[Case],
    oracle: Oracle,
    python: Path,
    snapshots: Mapping[str, Snapshot],
    places: Place,
    *,
    jobs: int,
    desk: _Desk,
) -> Iterator[Recorded]:
    """Run cases in oracle processes; a process that dies costs the case it was at, and the rest runs in a new one."""
    by_name = {case.name: case for case in cases}
    weights = {name: _weight_bytes(snapshots[name]) for name in {case.snapshot for case in cases}}
    remaining = {case.name: _task(case, snapshots[case.snapshot], places[case.name]) for case in cases}
    while remaining:
        before = len(remaining)
        at: dict[int, str] = {}
        loads = split(list(remaining.values()), jobs, weights)
        for event in events(oracle, python, loads):
            if event.kind == "started" and event.case in remaining:
                at[event.job] = event.case
            elif event.kind == "finished" and event.case in remaining:
                del remaining[event.case]
                yield desk.write(by_name[event.case], places[event.case])
            elif event.kind == "failed" and event.case in remaining:
                del remaining[event.case]
                yield failed(event.case, oracle, str(event.facts.get("kind")), str(event.facts.get("message")))
            elif event.kind == "ended" and at.get(event.job) in remaining:
                name = at[event.job]
                del remaining[name]
                yield _died(name, oracle, event)
            last = event
        if len(remaining) == before:  # no process came as far as its first case: another try would not either
            yield from (_died(name, oracle, last) for name in remaining)
            return


def failed(case: str, oracle: Oracle, kind: str, message: str) -> Recorded:
    """A case that the oracle could not run."""
    error = OracleError(
        f"oracle {oracle.name} {oracle.version} could not run a case",
        case=case,
        kind=kind,
        said=message or "nothing",
        next_step="correct the case in parity/cases/*.toml, or take it out: this oracle cannot answer it",
    )
    return Recorded(case=case, status="failed", error=error)


def _died(case: str, oracle: Oracle, event: Event) -> Recorded:
    error = OracleError(
        f"the process of oracle {oracle.name} {oracle.version} ended in the middle of a case",
        case=case,
        exit_code=event.facts.get("code"),
        last_lines=event.facts.get("stderr") or "none",
        next_step=f"assay record '{case}' to see it alone; assay oracles sync {oracle.name} checks the environment",
    )
    return Recorded(case=case, status="failed", error=error)


def _task(case: Case, snapshot: Snapshot, place: Path) -> Task:
    return Task(case=case.to_json(), snapshot={"name": snapshot.name, "path": str(snapshot.path)}, out=place)


def _weight_bytes(snapshot: Snapshot) -> int:
    return sum((snapshot.path / name).stat().st_size for name in snapshot.files if name.endswith(".safetensors"))
