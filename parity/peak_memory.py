"""How much memory a process has held at most: resident bytes, whoever allocated them, mapped files included.

The same measure for every peer: an allocator's own count would leave out what another one holds. On Linux the mark can be set
back, so that a figure is about one run; elsewhere it is about the whole life of the process.
"""

import contextlib
import resource
import sys
from pathlib import Path
from typing import Final

STATUS: Final = Path("/proc/self/status")
CLEAR: Final = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Set the mark back to what is held now, where the system can."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def peak_resident_bytes() -> int:
    """The most since `reset_peak`, or since the process began."""
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
