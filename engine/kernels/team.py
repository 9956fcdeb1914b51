"""Threads that share one call, asleep between calls.

Guarantees: nobody spins. Helpers sleep until there is work; the caller works too, never waits for a helper that has not
begun, and sleeps, at most as long as one piece takes, for one that has. So a busy machine costs time and nothing else.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from engine.kernels.driver import SLOTS

Control = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class Team:
    """The caller and `threads` - 1 helpers.

    Attributes:
        threads: At least 1.
    """

    threads: int
    _jobs: "SimpleQueue[_Job]" = field(default_factory=SimpleQueue)
    _started: bool = False

    def run(self, work: Callable[[int], int], pieces: int, *, threads: int) -> Control:
        """Do all pieces of a call.

        Args:
            work: Takes the address of int64 control words, takes pieces until none is left, and returns how many are done.
            pieces: How many there are.
            threads: Of the team, how many the call is worth.

        Returns:
            The control words afterwards.
        """
        control = np.zeros(SLOTS, np.int64)
        address: int = control.__array_interface__["data"][0]
        helpers = min(threads, self.threads, pieces) - 1
        if helpers < 1:
            done = work(address)
        else:
            self._start()
            job = _Job(work=work, control=control, pieces=pieces)
            for _ in range(helpers):
                self._jobs.put(job)
            done = work(address)
            if done < pieces:
                done = job.finished.get()  # whoever does the last piece says so
        if done != pieces:  # never hand out a result with a hole in it
            raise RuntimeError(f"{done} of {pieces} pieces of a product were done")
        return control

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for i in range(1, self.threads):
                threading.Thread(target=self._help, name=f"assay-kernels-{i}", daemon=True).start()

    def _help(self) -> None:
        while True:
            self._jobs.get().help()


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    work: Callable[[int], int]
    control: Control
    pieces: int
    finished: "SimpleQueue[int]" = field(default_factory=SimpleQueue)

    def help(self) -> None:
        """Take pieces; whoever sees the last one done says so."""
        done = self.work(self.control.__array_interface__["data"][0])
        if done >= self.pieces:
            self.finished.put(done)
