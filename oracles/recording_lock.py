"""One recording of a goldens folder at a time.

Guarantees: the second of two recordings fails at once and is told which process holds the first. The system frees the lock when
its holder dies in any way. The lock lives under `ASSAY_HOME`, so that nothing of it shows in the working tree.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from parity.atomic_file import write_atomically
from parity.errors import OracleError


@contextmanager
def recording_lock(journal: Path) -> Iterator[None]:
    """Hold the lock of the goldens folder whose journal is at `journal`.

    Raises:
        OracleError: Another process holds it.
    """
    journal.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(f"{journal}.holder")
    lock = FileLock(f"{journal}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise OracleError(
            "another recording is writing these goldens",
            held_by=_describe(holder),
            next_step="wait until it ends, or end that process; what it finished is kept",
        ) from None
    try:
        write_atomically(holder, f"{os.getpid()}\n".encode())
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _describe(holder: Path) -> str:
    try:
        return f"process {int(holder.read_text())}"
    except (OSError, ValueError):
        return "a process that has just started"
