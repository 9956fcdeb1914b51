"""From nothing to the first token: a process is started, opens a snapshot and computes one token.

Cold, the folder of compiled kernels is empty: everything is compiled and proved. Warm, it is what the cold start left there.
The peer has nothing to compile; the same start stands beside both.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.interleave import Figure
from bench.suite import figure
from bench.worker import Worker

Start = Callable[[], Worker]


def measure_startup(
    where: str,
    engine: Start,
    peer: Start,
    *,
    peer_name: str,
    load: dict[str, Any],
    name: str,
    scratch: Path,
    repeats: int,
) -> list[Figure]:
    """Start both sides in turn, first cold, then warm.

    Args:
        where: Such as `smollm2-135m/f32`.
        engine: Starts the engine.
        peer: Starts the peer.
        peer_name: What figures call it.
        load: The request that both understand.
        name: What the engine's weights are known by.
        scratch: Folder that this may fill.
        repeats: Pairs of each.

    Raises:
        AssayError: A worker refused or died.
    """
    figures = []
    folder = scratch / "kernels"
    for kind in ("cold", "warm"):
        ours, theirs = [], []
        for _ in range(repeats):
            if kind == "cold" and folder.exists():
                shutil.rmtree(folder)
            ours.append(_seconds(engine, {**load, "name": name, "folder": str(folder)}))
            theirs.append(_seconds(peer, load))
        note = "process, open, one token" + ("; kernels compiled and proved" if kind == "cold" else "")
        figures.append(figure(f"startup/{where}/{kind}", "s", peer_name, ours, theirs, bits=None, note=note))
    return figures


def _seconds(start: Start, load: dict[str, Any]) -> float:
    began = time.perf_counter()
    with start() as worker:
        worker.ask(**load)
        return time.perf_counter() - began
