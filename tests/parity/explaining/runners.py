"""A runner with a fault planted, for the time of its own runs alone: two of them stand for an oracle and an engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from parity.case import Case
from parity.engine_runner import EngineRunner
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.trace import Trace

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class PlantedRunner:
    """The engine, built and run inside `plant`."""

    name: str = "engine"
    plant: Plant = nullcontext

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        with self.plant():
            return EngineRunner(kernels=None).run(case, snapshot)

    def provenance(self) -> Provenance:
        return EngineRunner(kernels=None).provenance()
