"""One oracle process from the parent's side: a hermetic environment, a stream of events, and an end that is certain.

Guarantees: the child inherits no environment variable; its home and temporary folders are private and removed afterwards.
Leaving the block of `events` in any way, also by an exception, kills what still runs; a parent that is itself killed
closes the child's standard input, on which the child ends.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from oracles.registry import REPOSITORY, Oracle

LAST_LINES: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One case for an oracle process.

    Attributes:
        case: As `Case.to_json` gives it.
        snapshot: `name` and `path`.
        out: Folder for the trace.
    """

    case: Mapping[str, Any]
    snapshot: Mapping[str, str]
    out: Path

    @property
    def name(self) -> str:
        """The case's name."""
        return str(self.case["name"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a process said: `ready`, `started`, `finished`, `failed`, or `ended` when it has exited.

    Attributes:
        job: Which process.
        kind: One of the five.
        case: Name of the case, for the middle three.
        facts: `kind` and `message` of a failure; `code` and `stderr` (last lines) of an end.
    """

    job: int
    kind: str
    case: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def hermetic(private: Path) -> dict[str, str]:
    """The whole environment of an oracle process; `private` is a folder of its own."""
    return {
        "PATH": os.defpath,
        "HOME": str(private),
        "TMPDIR": str(private),
        "HF_HOME": str(private / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MLX_DISABLE_COMPILE": "1",  # the same bits, and no compiler at run time
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUTF8": "1",
        "LC_ALL": "C.UTF-8",
    }


def events(oracle: Oracle, python: Path, jobs: Mapping[int, Sequence[Task]]) -> Iterator[Event]:
    """Run one process a job at the same time and yield what they say until all have ended.

    Args:
        oracle: Whose entry module runs.
        python: Interpreter of its environment.
        jobs: Number of the job to its tasks, in the order in which they run.
    """
    said: queue.Queue[Event] = queue.Queue()
    with contextlib.ExitStack() as stack:
        for job, tasks in jobs.items():
            private = Path(stack.enter_context(TemporaryDirectory(prefix="assay-oracle-", ignore_cleanup_errors=True)))
            child = _spawn(oracle, python, tasks, private)
            stack.callback(_kill, child)
            threading.Thread(target=_listen, args=(job, child, private, said), daemon=True).start()
        running = set(jobs)
        while running:
            event = said.get()
            if event.kind == "ended":
                running.discard(event.job)
            yield event


def _spawn(oracle: Oracle, python: Path, tasks: Sequence[Task], private: Path) -> subprocess.Popen[bytes]:
    request = private / "request.json"
    listed = [{"case": dict(t.case), "snapshot": dict(t.snapshot), "out": str(t.out)} for t in tasks]
    request.write_text(json.dumps({"tasks": listed}), encoding="utf-8")
    with (private / "stderr").open("wb") as stderr:
        return subprocess.Popen(
            [python, "-m", oracle.entry, str(request)],
            cwd=REPOSITORY,
            env=hermetic(private),
            stdin=subprocess.PIPE,  # never written to: its closing tells the child that the parent is gone
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )


def _listen(job: int, child: subprocess.Popen[bytes], private: Path, said: "queue.Queue[Event]") -> None:
    """Turn a child's lines into events, and its exit into the last one."""
    assert child.stdout is not None  # noqa: S101 - we asked for the pipe
    for line in child.stdout:
        try:
            raw = json.loads(line)
            event = Event(job=job, kind=raw.pop("event"), case=raw.pop("case", None), facts=raw)
        except (ValueError, KeyError, AttributeError):
            continue  # a line torn by a kill; what it announced shows in the folder or in the exit
        said.put(event)
    code = child.wait()
    try:
        lines = (private / "stderr").read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        lines = []  # the private folder is already gone: the parent is leaving
    said.put(Event(job=job, kind="ended", facts={"code": code, "stderr": "\n".join(lines)}))


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and whatever it started, and wait for it; harmless when it has exited."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it exited meanwhile
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
