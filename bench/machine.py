"""What machine a figure was measured on: enough to compare runs of one machine, nothing that names it.

No host name, user or path: a figure may be published with its machine identity.
"""

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

from parity.platform_key import platform_key


def machine() -> dict[str, Any]:
    """Platform key, processor, cores, memory, C library, Python, load before the run, and a digest of the stable part."""
    stable: dict[str, Any] = {
        "platform": platform_key(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
    }
    identity = hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:12]
    return {"identity": identity, **stable, "load_before": [round(load, 2) for load in os.getloadavg()]}


def _processor() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
