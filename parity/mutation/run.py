"""Many trials: all faults or a sample of them, in worker processes.

Guarantees: an outcome a fault, in the order of the catalogue, whichever worker had it; a sample depends on the catalogue
alone and holds every kind before any kind twice. Workers are spawned, so no fault reaches another process.
"""

import difflib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from multiprocessing import get_context
from typing import NoReturn

from parity.errors import AssayError, UsageError
from parity.mutation.catalogue import FAULTS, by_name
from parity.mutation.fault import KINDS, NOT_MODULES, Fault
from parity.mutation.trial import Fate, Outcome, try_fault

OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What became of every fault that was tried.

    Attributes:
        outcomes: In the order of the catalogue.
    """

    outcomes: tuple[Outcome, ...]

    @property
    def caught(self) -> tuple[Outcome, ...]:
        """Faults that a case saw."""
        return tuple(o for o in self.outcomes if o.fate is Fate.CAUGHT)

    @property
    def holes(self) -> tuple[Outcome, ...]:
        """Faults that acted and that no case saw."""
        return tuple(o for o in self.outcomes if o.fate is Fate.HOLE)

    @property
    def void(self) -> tuple[Outcome, ...]:
        """Faults that are none: they never acted, changed nothing or broke the engine down."""
        return tuple(o for o in self.outcomes if o.fate is Fate.VOID)

    @property
    def localised(self) -> tuple[Outcome, ...]:
        """Faults that were seen first where they are."""
        return tuple(o for o in self.caught if o.localised)

    @property
    def in_modules(self) -> tuple[Outcome, ...]:
        """Faults of modules: all but those that are first seen in what is none, such as ids, caches' words or text."""
        return tuple(o for o in self.outcomes if o.at not in NOT_MODULES)

    @property
    def misplaced(self) -> tuple[Outcome, ...]:
        """Faults that were seen first elsewhere, undeclared; and declared ones that were not."""
        return tuple(o for o in self.outcomes if o.misplaced)

    @property
    def false_alarms(self) -> tuple[Outcome, ...]:
        """Trials whose control differed."""
        return tuple(o for o in self.outcomes if o.false_alarm)

    @property
    def passes(self) -> bool:
        """Every fault was caught, where it had to be, and no control cried wolf."""
        caught = bool(self.outcomes) and len(self.caught) == len(self.outcomes)
        return caught and not self.misplaced and not self.false_alarms


def mutate(faults: Sequence[Fault], *, jobs: int = 1, on_outcome: OnOutcome | None = None) -> Mutation:
    """Try faults.

    Args:
        faults: From the catalogue; with `jobs` 1 any.
        jobs: Worker processes; 1 tries everything in this one.
        on_outcome: Told each outcome as it comes in.

    Raises:
        AssayError: A worker died, a case does not exist, or this platform has no goldens.
    """
    found: dict[str, Outcome] = {}
    for outcome in _outcomes(faults, jobs):
        found[outcome.fault] = outcome
        if on_outcome:
            on_outcome(outcome)
    return Mutation(outcomes=tuple(found[fault.name] for fault in faults))


def chosen(pattern: str | None, sample: int | None, faults: Sequence[Fault] = FAULTS) -> tuple[Fault, ...]:
    """The faults whose names match a shell glob, or a sample of them.

    Raises:
        UsageError: None matches; near names are listed.
    """
    named = tuple(f for f in faults if pattern is None or f.name == pattern or fnmatchcase(f.name, pattern))
    if not named:
        names = [fault.name for fault in faults]
        raise UsageError(
            f"no fault matches {pattern!r}",
            near="\n".join(difflib.get_close_matches(pattern or "", names, n=5, cutoff=0.4)) or "none",
            faults=len(names),
            next_step="assay mutate --list",
        )
    return named if sample is None else sampled(named, sample)


def sampled(faults: Sequence[Fault], size: int) -> tuple[Fault, ...]:
    """So many faults: of each kind one, then of each kind a second, and so on, drawn by a digest of their names."""
    drawn = sorted(faults, key=lambda fault: hashlib.sha256(fault.name.encode()).digest())
    kinds = [[fault for fault in drawn if fault.kind == kind] for kind in KINDS]
    in_turn = [fault for layer in zip_longest(*kinds) for fault in layer if fault is not None]
    taken = {fault.name for fault in in_turn[:size]}
    return tuple(fault for fault in faults if fault.name in taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error that is the caller's to mend, on its way from a worker.

    Attributes:
        kind: Its class.
        what: One line that says what happened.
        next_step: What mends it.
        facts: Lines between the two.
    """

    kind: type[AssayError]
    what: str
    next_step: str
    facts: dict[str, str]

    def refuse(self) -> NoReturn:
        """Raise the error again, word for word.

        Raises:
            AssayError: As in the worker.
        """
        raise self.kind(self.what, next_step=self.next_step, **self.facts)


def try_named(name: str) -> Outcome | Refusal:
    """Try the catalogue's fault of this name; what a worker does."""
    try:
        return try_fault(by_name(name))
    except AssayError as error:
        facts = {key: str(value) for key, value in error.facts.items()}
        return Refusal(kind=type(error), what=error.what, next_step=error.next_step, facts=facts)


def _outcomes(faults: Sequence[Fault], jobs: int) -> Iterator[Outcome]:
    if jobs == 1 or len(faults) < 2:
        yield from (try_fault(fault) for fault in faults)
        return
    pool = ProcessPoolExecutor(max_workers=min(jobs, len(faults)), mp_context=get_context("spawn"))
    try:
        futures = {pool.submit(try_named, fault.name): fault for fault in faults}
        for future in as_completed(futures):
            try:
                found = future.result()
            except BrokenProcessPool as error:
                raise AssayError(
                    "a worker process died while a fault was planted",
                    fault=f"{futures[future].name}, or one tried beside it",
                    next_step="assay mutate --jobs 1, and watch which fault is the last",
                ) from error
            yield found if isinstance(found, Outcome) else found.refuse()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
