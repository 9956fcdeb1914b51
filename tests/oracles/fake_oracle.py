"""An oracle that computes nothing: rows are digests of the case, and faults are read from `fake.json` in the snapshot.

`log` in the snapshot's folder lists every case that was begun and for which parent, so that tests can count runs.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from oracles.runner_loop import RunCase, serve
from parity.case import Case
from parity.provenance import Provenance
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name


def start() -> tuple[RunCase, Provenance]:
    print("a library that prints while it is imported")  # noqa: T201
    return run, Provenance.capture(("mlx",), device="cpu")


def run(case: Case, snapshot: Path) -> Trace:
    faults = json.loads((snapshot / "fake.json").read_text())
    with (snapshot / "log").open("a") as log:
        log.write(f"{case.name} {os.getppid()}\n")
    (snapshot / "pid").write_text(str(os.getpid()))
    print("a library that prints")  # noqa: T201
    time.sleep(faults.get("seconds", 0))
    if case.name in faults.get("raise", ()):
        raise NotImplementedError("this cache cannot be quantised")
    if case.name in faults.get("exit", ()):
        sys.exit(1)
    if case.name in faults.get("die", ()):
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    tensors = {logits_name(step): _row(case, step, faults) for step in range(case.num_steps)}
    if case.name in faults.get("short", ()):
        del tensors[logits_name(case.num_steps - 1)]
    ids = case.forced_ids or tuple(range(case.num_steps))
    tensors[TOKEN_IDS] = Tensor.of(np.array(ids, dtype="<i4"))
    return Trace(tensors=tensors, cache=("plain",))


def _row(case: Case, step: int, faults: dict[str, object]) -> Tensor:
    question = f"{case.prompt_ids} {step} {faults.get('salt', '')}".encode()
    row = np.frombuffer(hashlib.sha256(question).digest(), dtype="<u4").astype("<f4")[None]
    if case.name in faults.get("nan", ()):  # type: ignore[operator]
        row[0, 3] = np.nan
    width = faults.get("width", 1)
    return Tensor.of(np.tile(row, (1, int(width))))  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], start))
