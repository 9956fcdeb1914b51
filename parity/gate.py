"""The gate: runs the engine over cases, judges every trace, and decides whether all is well.

Guarantees: one verdict a case, in the order of the cases, whatever happens: a refusal of the engine, a crash, a dead worker
process, a golden that is missing, rotten or stale. Goldens that no case claims fail too. Running (`run_case`) and judging
(`parity.judge.judge`) stay two steps with a trace between them. Goldens are read here, never written.
"""

import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from engine.errors import EngineError
from parity import row_store
from parity.case import Case
from parity.deviations import Deviation, apply, unmatched
from parity.errors import AssayError, GoldenError
from parity.golden import GOLDENS, Golden, golden_path
from parity.golden_folder import golden_version, unused_goldens
from parity.judge import judge, staleness
from parity.platform_key import platform_key
from parity.provenance import Provenance
from parity.snapshot import NO_MODEL, Snapshot
from parity.trace import Runner, Trace
from parity.verdict import Status, Verdict

RunnerFactory = Callable[[], Runner]
A_FORWARD: Final = 10_000_000  # bytes of weights that are read while a forward of a tiny model is dispatched
OnVerdict = Callable[[int, int, Verdict], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker needs for one case.

    Attributes:
        case: The question.
        snapshot: The folder to run.
        version: Of the oracle whose golden is read; None where this platform has none.
        root: Folder of goldens.
        platform: Platform key.
        deviations: Known ones.
        traces: Folder to keep traces in, if they are to be kept.
    """

    case: Case
    snapshot: Snapshot
    version: str | None
    root: Path
    platform: str
    deviations: tuple[Deviation, ...]
    traces: Path | None


def check(
    cases: tuple[Case, ...],
    runner_factory: RunnerFactory,
    *,
    find_snapshot: Callable[[str], Snapshot],
    every_name: Collection[str],
    pattern: str | None = None,
    deviations: tuple[Deviation, ...] = (),
    root: Path = GOLDENS,
    platform: str | None = None,
    jobs: int = 1,
    traces: Path | None = None,
    on_verdict: OnVerdict | None = None,
) -> tuple[Verdict, ...]:
    """Run and judge cases.

    Args:
        cases: The selected ones.
        runner_factory: Makes a runner inside each worker process; importable by name, since workers are spawned.
        find_snapshot: Name to snapshot; asked once for each.
        every_name: Names of all cases, selected or not: what they do not claim is unused.
        pattern: Glob that selected the cases; unused goldens are reported within it.
        deviations: Known ones.
        root: Folder of goldens.
        platform: Platform key; this machine's by default.
        jobs: Worker processes; 1 runs everything in this one.
        traces: Keep every trace under this folder, by case name.
        on_verdict: Told (done, total, verdict) as verdicts come in.

    Returns:
        A verdict a case in their order, then one for every unused golden and for every deviation that matches no case.

    Raises:
        GoldenError: This platform has no goldens at all, or those of two versions of an oracle.
    """
    platform = platform or platform_key()
    versions = {oracle: golden_version(oracle, root, platform) for oracle in dict.fromkeys(c.oracle for c in cases)}
    if not any(versions.values()):
        raise GoldenError(
            f"there are no goldens for {platform}",
            looked_at=", ".join(f"goldens/{oracle}-*/{platform}" for oracle in versions),
            next_step="make parity, which records them first, or assay record",
        )
    verdicts: dict[str, Verdict] = {}
    tasks: list[Task] = []
    snapshots = {name: _snapshot(find_snapshot, name) for name in dict.fromkeys(c.snapshot for c in cases)}
    for case in cases:
        snapshot = snapshots[case.snapshot]
        if isinstance(snapshot, AssayError):
            verdicts[case.name] = _refused(case, snapshot)
            continue
        task = Task(
            case=case,
            snapshot=snapshot,
            version=versions[case.oracle],
            root=root,
            platform=platform,
            deviations=deviations,
            traces=traces,
        )
        tasks.append(task)
    for verdict in _verdicts(tasks, runner_factory, jobs):
        verdicts[verdict.name] = verdict
        if on_verdict:
            on_verdict(len(verdicts), len(cases), verdict)
    found = {oracle: version for oracle, version in versions.items() if version}
    unused = unused_goldens(found, every_name, pattern=pattern, root=root, platform=platform)
    return (*(verdicts[case.name] for case in cases), *unused, *unmatched(deviations, every_name))


def exit_code(verdicts: tuple[Verdict, ...]) -> int:
    """0 if there are verdicts and all of them pass, else 1."""
    return 0 if verdicts and all(verdict.passes for verdict in verdicts) else 1


def run_case(runner: Runner, case: Case, snapshot: Snapshot, traces: Path | None = None) -> Trace:
    """Run one case, and keep its trace if asked to."""
    trace = runner.run(case, snapshot)
    if traces is not None:
        trace.save(traces / case.name)
    return trace


def check_one(task: Task, runner_factory: RunnerFactory) -> Verdict:
    """Run and judge one case; whatever goes wrong becomes its verdict."""
    try:
        return apply(task.deviations, _judged(task, runner_factory))
    except (AssayError, EngineError) as error:
        return _refused(task.case, error, task.snapshot)
    except Exception:  # noqa: BLE001 - a fault of one case must not cost the others their verdicts
        return _failed(task.case, {"reason": traceback.format_exc()}, "report it with this text", task.snapshot)


def _judged(task: Task, runner_factory: RunnerFactory) -> Verdict:
    case = task.case
    file = (
        None
        if task.version is None
        else golden_path(case, version=task.version, root=task.root, platform=task.platform)
    )
    if file is None or not file.exists():
        return Verdict(
            name=case.name,
            case=case,
            status=Status.MISSING_GOLDEN,
            what=f"no golden of {case.name} for {task.platform}",
            facts={"looked at": f"goldens/{case.oracle}-{task.version or '*'}/{task.platform}/{case.name}.json"},
            next_step=f"assay record '{case.name}'",
            model_type=task.snapshot.config.get("model_type"),
        )
    golden = Golden.load(file)
    provenance = _provenance(runner_factory)
    if stale := staleness(case, golden, snapshot=task.snapshot, provenance=provenance):
        return replace(stale, judged=provenance, believed=golden.provenance)
    trace = run_case(_runner(runner_factory), case, task.snapshot, task.traces)
    with warnings.catch_warnings(record=True, category=row_store.RowStoreWarning) as told:
        warnings.simplefilter("always", row_store.RowStoreWarning)
        rows = partial(row_store.load, case, task.version or "", golden.digests)
        verdict = judge(case, golden, trace, snapshot=task.snapshot, provenance=provenance, stored_rows=rows)
    if told:
        verdict = replace(verdict, facts={**verdict.facts, "rows": "\n".join(str(w.message) for w in told)})
    used = _runner(runner_factory).provenance()  # known only now: a model may have refused the kernels
    return replace(verdict, judged=used, believed=golden.provenance)


@cache
def _runner(factory: RunnerFactory) -> Runner:
    """One runner a process: it keeps its model from case to case."""
    return factory()


@cache
def _provenance(factory: RunnerFactory) -> Provenance:
    return _runner(factory).provenance()


def _snapshot(find: Callable[[str], Snapshot], name: str) -> Snapshot | AssayError:
    if name == NO_MODEL.name:
        return NO_MODEL
    try:
        return find(name)
    except AssayError as error:
        return error


def _refused(case: Case, error: AssayError | EngineError, snapshot: Snapshot | None = None) -> Verdict:
    """An error with a message of its own."""
    return _failed(case, {"reason": error.what, **error.facts}, error.next_step, snapshot)


def _failed(case: Case, facts: dict[str, object], next_step: str, snapshot: Snapshot | None) -> Verdict:
    return Verdict(
        name=case.name,
        case=case,
        status=Status.ERROR,
        what=f"{case.name} could not be judged",
        facts={name.replace("_", " "): value for name, value in facts.items()},
        next_step=next_step,
        model_type=None if snapshot is None else snapshot.config.get("model_type"),
    )


def _verdicts(tasks: list[Task], factory: RunnerFactory, jobs: int) -> Iterator[Verdict]:
    """Verdicts as they come in, cases of one model together, the longest work first."""
    ordered = _by_model(tasks)
    if jobs == 1 or len(ordered) < 2:
        yield from (check_one(task, factory) for task in ordered)
        return
    left = {task.case.name: task for task in ordered}
    for verdict in _pooled(ordered, factory, jobs):
        del left[verdict.name]
        yield verdict
    for task in left.values():  # a worker died: whoever kills a process of its own is to blame
        died = True
        for verdict in _pooled([task], factory, 1):
            died = False
            yield verdict
        if died:
            facts: dict[str, object] = {"reason": "its worker process died without a word"}
            next_step = f"assay check '{task.case.name}' --jobs 1, and watch the memory"
            yield _failed(task.case, facts, next_step, task.snapshot)


def _pooled(tasks: list[Task], factory: RunnerFactory, jobs: int) -> Iterator[Verdict]:
    """Verdicts of a pool of spawned processes; ends early, with some missing, where one of them dies."""
    pool = ProcessPoolExecutor(max_workers=min(jobs, len(tasks)), mp_context=get_context("spawn"))
    try:
        futures: list[Future[Verdict]] = [pool.submit(check_one, task, factory) for task in tasks]
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                continue
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _by_model(tasks: list[Task]) -> list[Task]:
    """Models by the cost of all their cases, the cases of each by their own cost, dearest first."""
    totals: dict[tuple[str, str], int] = {}
    for task in tasks:
        totals[_model(task)] = totals.get(_model(task), 0) + _cost(task)
    return sorted(tasks, key=lambda t: (-totals[_model(t)], _model(t), -_cost(t)))


def _model(task: Task) -> tuple[str, str]:
    return task.case.snapshot, task.case.dtype


def _cost(task: Task) -> int:
    """Tokens times what one costs: the bytes of the model, and as much again as a tiny model's forward takes beside them."""
    tokens = len(task.case.prompt_ids) + 4 * task.case.num_steps
    if task.case.sampling is not None:
        return tokens * A_FORWARD
    weights = (task.snapshot.path / name for name in task.snapshot.files if name.endswith(".safetensors"))
    return tokens * (A_FORWARD + sum(file.stat().st_size for file in weights if file.exists()))
