"""Whether the machine is quiet enough for a headline figure.

Guarantees: each condition is looked at before anything is measured, and told with what was found; what a system does not show
is `unknown` and no reason to refuse. Nothing here measures speed.
Source: spec/golden-method.md section 9.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LOAD_A_CORE: Final = 0.5  # waiting or running, of others, a core
SWAP_MIB: Final = 512
FREE_SHARE: Final = 0.35
PROCESS_MIB: Final = 2048
PROC: Final = Path("/proc")
KIB_A_MIB: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One thing that makes figures doubtful.

    Attributes:
        name: What was looked at.
        found: In words.
        wanted: In words.
        holds: Whether it is as wanted; None where the system does not show it.
    """

    name: str
    found: str
    wanted: str
    holds: bool | None


def preflight(proc: Path = PROC) -> list[Condition]:
    """Look at load, swap, free memory and large foreign processes.

    Args:
        proc: Where Linux shows them.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    memory = _memory(proc / "meminfo")
    return [
        Condition(
            name="load",
            found=f"{load:.2f} a core",
            wanted=f"at most {LOAD_A_CORE} a core",
            holds=load <= LOAD_A_CORE,
        ),
        _swap(memory),
        _free(memory),
        _foreign(proc),
    ]


def complaints(conditions: list[Condition]) -> list[str]:
    """What does not hold, a line each."""
    return [f"{c.name}: {c.found}, wanted {c.wanted}" for c in conditions if c.holds is False]


def to_json(conditions: list[Condition]) -> list[dict[str, Any]]:
    """As results keep it."""
    return [{"name": c.name, "found": c.found, "wanted": c.wanted, "holds": c.holds} for c in conditions]


def _swap(memory: Mapping[str, int]) -> Condition:
    wanted = f"at most {SWAP_MIB} MiB"
    if not {"SwapTotal", "SwapFree"} <= memory.keys():
        return Condition(name="swap", found="unknown", wanted=wanted, holds=None)
    used = (memory["SwapTotal"] - memory["SwapFree"]) // KIB_A_MIB
    return Condition(name="swap", found=f"{used} MiB in use", wanted=wanted, holds=used <= SWAP_MIB)


def _free(memory: Mapping[str, int]) -> Condition:
    wanted = f"at least {FREE_SHARE:.0%}"
    if not {"MemTotal", "MemAvailable"} <= memory.keys():
        return Condition(name="free memory", found="unknown", wanted=wanted, holds=None)
    share = memory["MemAvailable"] / memory["MemTotal"]
    return Condition(name="free memory", found=f"{share:.0%}", wanted=wanted, holds=share >= FREE_SHARE)


def _foreign(proc: Path) -> Condition:
    """Large processes that are neither this one nor its parents nor its children."""
    name, wanted = "other processes", f"none above {PROCESS_MIB} MiB"
    sizes = dict(_sizes(proc))
    if not sizes:
        return Condition(name=name, found="unknown", wanted=wanted, holds=None)
    large = sorted(mib for pid, mib in sizes.items() if mib > PROCESS_MIB and pid != os.getpid())
    found = f"{len(large)} above {PROCESS_MIB} MiB" if large else f"none above {PROCESS_MIB} MiB"
    return Condition(name=name, found=found, wanted=wanted, holds=not large)


def _sizes(proc: Path) -> list[tuple[int, int]]:
    found = []
    for folder in proc.glob("[0-9]*") if proc.is_dir() else ():
        try:
            status = (folder / "status").read_text()
        except OSError:
            continue  # it ended meanwhile
        resident = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
        if resident:
            found.append((int(folder.name), int(resident[0]) // KIB_A_MIB))
    return found


def _memory(file: Path) -> dict[str, int]:
    """Name to KiB."""
    if not file.is_file():
        return {}
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
