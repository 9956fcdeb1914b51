"""One trial: a fault is planted, its cases are asked until one of them sees it, and the same case is run once more without it.

The second run is the trial's control: it shows that the fault alone made the difference, that it was taken out without a
trace, and that the case does not cry wolf. Running and judging are two steps here as in the gate, with the same judge.

Guarantees: a fault that was planted and never reached is told apart from one that nobody saw.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

from engine.errors import EngineError
from parity.case import Case
from parity.engine_runner import EngineRunner
from parity.errors import GoldenError, UsageError
from parity.golden import GOLDENS, Golden, golden_path
from parity.golden_folder import golden_version
from parity.judge import judge
from parity.matrix import load_cases
from parity.models.fetch import ensure_snapshot
from parity.mutation import written_prompts
from parity.mutation.fault import Fault
from parity.mutation.planting import NoChangeError
from parity.platform_key import platform_key
from parity.provenance import Provenance
from parity.snapshot import NO_MODEL, Snapshot
from parity.trace import Trace
from parity.verdict import Status, Verdict

REFUSED: Final = "REFUSED"  # the engine told a user what is wrong


class Fate(Enum):
    """What became of a fault."""

    CAUGHT = "CAUGHT"
    HOLE = "HOLE"  # it acted, and every case was identical all the same
    VOID = "VOID"  # it never acted, changed nothing, or broke the engine down: the catalogue is at fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one case says.

    Attributes:
        case: Its name.
        identical: It sees nothing.
        steps: Rows, draws or tokens until the first difference, that one included; None where it cannot be told.
        found: Where it sees the first difference, in the words of `Fault.at`; empty where nothing was compared.
        status: The verdict's word.
    """

    case: str
    identical: bool
    steps: int | None = None
    found: str = ""
    status: str = Status.IDENTICAL.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one fault.

    Attributes:
        fault: Its name.
        kind: Of the fault.
        says: What is wrong.
        at: Where it must be seen first.
        hidden: Of the fault: why it cannot be localised; empty where it must be.
        fate: Whether it was caught.
        seen: The answer of the case that caught it.
        asked: How many cases were asked.
        control: The answer of the last case asked, run again without the fault.
        why: Of a void fault, the reason; empty elsewhere.
    """

    fault: str
    kind: str
    says: str
    at: str
    hidden: str
    fate: Fate
    seen: Answer | None
    asked: int
    control: Answer
    why: str = ""

    @property
    def localised(self) -> bool:
        """Whether it was seen first where it is."""
        return self.seen is not None and self.seen.found == self.at

    @property
    def misplaced(self) -> bool:
        """Whether it was seen first elsewhere than where it is, or where nothing is to be seen, against what is declared."""
        return self.fate is Fate.CAUGHT and self.localised == bool(self.hidden)

    @property
    def false_alarm(self) -> bool:
        """Whether a case differed without the fault."""
        return not self.control.identical


def try_fault(fault: Fault) -> Outcome:
    """Plant a fault, ask its cases, take it out, and run the last of them again.

    Raises:
        UsageError: It names a case that does not exist.
        GoldenError: This platform has no goldens.
    """
    asked, times, seen, why = 0, 0, None, ""
    try:
        with fault.plant.planted() as acted:
            while seen is None and asked < len(fault.cases):
                asked += 1
                answer = ask(fault.cases[asked - 1])
                seen = None if answer.identical else answer
            times = acted.times
    except NoChangeError as error:
        why = str(error)
    if seen is not None and seen.status == Status.ERROR.value:
        why = f"the engine breaks down: {seen.found}"
    if not times:
        why = why or "nothing that the cases compute reaches it"
    return Outcome(
        fault=fault.name,
        kind=fault.kind,
        says=fault.says,
        at=fault.at,
        hidden=fault.hidden,
        fate=Fate.VOID if why else Fate.CAUGHT if seen else Fate.HOLE,
        seen=seen,
        asked=asked,
        control=ask(fault.cases[max(asked, 1) - 1]),
        why=why,
    )


def ask(name: str) -> Answer:
    """Run one case on the engine as it stands, and judge it.

    An engine that refuses has not given the golden's bits: that is a difference too, in no module. One that breaks down has
    computed nothing that could be judged.
    """
    if name.startswith(written_prompts.PREFIX):
        return _written(name)
    case = _case(name)
    snapshot, golden = _snapshot(case.snapshot), _golden(name)
    try:
        trace = EngineRunner(kernels=None).run(case, snapshot)
    except NoChangeError:
        raise
    except EngineError as error:
        return Answer(case=name, identical=False, found=error.kind, status=REFUSED)
    except Exception as error:  # noqa: BLE001 - whatever a fault makes of the engine
        found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return Answer(case=name, identical=False, found=found, status=Status.ERROR.value)
    verdict = judge(case, golden, trace, snapshot=snapshot, provenance=_provenance())
    if verdict.status is Status.STALE_GOLDEN:
        raise GoldenError(verdict.what, next_step=verdict.next_step, **dict(verdict.facts))
    if verdict.status is Status.IDENTICAL:
        return Answer(case=name, identical=True)
    return Answer(
        case=name,
        identical=False,
        steps=None if verdict.first_step is None else verdict.first_step + 1,
        found=_found(verdict, trace, golden),
        status=verdict.status.value,
    )


def _found(verdict: Verdict, trace: Trace, golden: Golden) -> str:
    """The first tensor that differs: a module's path, or one of `fault.NOT_MODULES`."""
    if verdict.status is Status.INCOMPARABLE:
        return "cache" if trace.cache != golden.cache else "shape"
    first = verdict.differing[0]
    return first.split("/", 2)[2] if first.startswith("activations/") else first.partition("/")[0]


def _written(name: str) -> Answer:
    difference = written_prompts.difference(name)
    if difference is None:
        return Answer(case=name, identical=True)
    return Answer(
        case=name,
        identical=False,
        steps=difference.token + 1,
        found=difference.where,
        status=Status.DIFFERENT.value,
    )


@cache
def _cases() -> dict[str, Case]:
    return {case.name: case for case in load_cases()}


def _case(name: str) -> Case:
    if name not in _cases():
        raise UsageError(
            "a seeded fault names a case that does not exist", case=name, next_step="mend parity/mutation/catalogue"
        )
    return _cases()[name]


@cache
def _snapshot(name: str) -> Snapshot:
    return NO_MODEL if name == NO_MODEL.name else ensure_snapshot(name)


@cache
def _golden(name: str) -> Golden:
    case = _case(name)
    version = golden_version(case.oracle, GOLDENS, platform_key())
    if version is None:
        raise GoldenError(
            f"there are no goldens for {platform_key()}",
            looked_at=f"goldens/{case.oracle}-*/{platform_key()}",
            next_step="make parity, which records them first, or assay record",
        )
    return Golden.load(golden_path(case, version=version))


@cache
def _provenance() -> Provenance:
    return EngineRunner(kernels=None).provenance()
