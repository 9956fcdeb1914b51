"""The whole matrix of cases, on kernels and on plain operations: how many times faster the gate became.

Both sides are `assay check` itself, in processes of their own, asked in turn. A ratio counts only where both gave every case
the same verdict; that stands in the figure's bits.

Processor time is compared beside wall time: on a shared machine the wall measures the neighbours too.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.interleave import Figure
from bench.suite import figure
from parity.errors import AssayError

REPOSITORY: Final = Path(__file__).resolve().parent.parent
SIDES: Final = {"engine": None, "plain": "plain"}  # value of ASSAY_KERNELS
Answer = dict[str, Any]
Ask = Callable[[str, str | None], Answer]


def measure_gate(
    pattern: str | None, *, repeats: int, on_progress: Callable[[str], None], ask: Ask | None = None
) -> list[Figure]:
    """Check the matrix on both sides.

    Args:
        pattern: Of cases; all by default.
        repeats: Of both sides.
        on_progress: Told in a line each what has been done.
        ask: How one side is checked; by default as a process.

    Raises:
        AssayError: A check could not be run at all.
    """
    ask = ask or checked
    answers: dict[str, list[Answer]] = {side: [] for side in SIDES}
    for turn in range(repeats):
        for side in list(SIDES) if turn % 2 == 0 else list(SIDES)[::-1]:
            answer = ask(side, pattern)
            answers[side].append(answer)
            on_progress(f"checked {len(answer['verdicts'])} cases on {side}: {answer['wall']:.0f} s")
    same = all(a["verdicts"] == b["verdicts"] for a, b in zip(answers["engine"], answers["plain"], strict=True))
    note = f"{len(answers['engine'][0]['verdicts'])} cases; bits: whether all verdicts are the same; ratio: plain over kernels"
    return [
        figure(
            f"gate/{name}",
            "1/s",
            "plain",
            [1 / a[key] for a in answers["engine"]],
            [1 / a[key] for a in answers["plain"]],
            bits=same,
            note=note,
        )
        for name, key in (("wall", "wall"), ("processor", "processor"))
    ]


def checked(side: str, pattern: str | None) -> Answer:
    """Run `assay check` once: its verdicts by case, wall and processor seconds.

    Raises:
        AssayError: It gave no verdicts.
    """
    level = SIDES[side]
    environment = {name: value for name, value in os.environ.items() if name != "ASSAY_KERNELS"}
    environment |= {} if level is None else {"ASSAY_KERNELS": level}
    with TemporaryDirectory(prefix="assay-bench-") as results:
        command = [sys.executable, "-m", "parity", "check", "--json", "--results", results]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        done = subprocess.run(
            [*command, *([pattern] if pattern else [])],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        cases = json.loads(done.stdout)["cases"]
    except (ValueError, KeyError) as error:
        raise AssayError(
            "the check gave no verdicts",
            exit_code=done.returncode,
            last_lines="\n".join(done.stderr.strip().splitlines()[-5:]) or "nothing",
            next_step="assay check",
        ) from error
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"verdicts": {case["case"]: case["status"] for case in cases}, "wall": wall, "processor": spent}
