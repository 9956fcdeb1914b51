"""Sweep an oracle from the parent's side: a process that answers row by row, started again where it dies of a row.

Guarantees: the process is as hermetic as those that record goldens; a row that kills its process is reported as such and the
sweep goes on behind it; leaving early kills what runs.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from oracles.process import LAST_LINES, hermetic
from oracles.registry import REPOSITORY
from parity.errors import OracleError
from parity.sweeping.outcome import Outcome
from parity.sweeping.row import Row

DEATHS: Final = 20  # of one sweep, at most


def sweep_oracle(
    entry: str,
    python: Path,
    *,
    subject: str,
    models: Mapping[str, Mapping[str, Any]],
    functions: Mapping[str, Any],
    dtypes: Sequence[str],
    kvs: Sequence[str],
    patterns: Sequence[str],
) -> Iterator[Row]:
    """Rows of one oracle, as they come.

    Args:
        entry: Module to run, such as `oracles.mlx_lm.sweep`.
        python: Interpreter of the oracle's environment.
        subject: What the rows are to be called, such as `mlx-lm 0.32.2`.
        models: Name to config.
        functions: Config of the model whose oracle's functions are asked.
        dtypes: In which models compute.
        kvs: KV modes, `fp` among them.
        patterns: Shell globs over row names; none for all.

    Raises:
        OracleError: The process ended without having asked anything, or died too often.
    """
    answered: list[str] = []
    request = {"models": models, "functions": functions, "dtypes": dtypes, "kvs": kvs, "patterns": patterns}
    for _ in range(DEATHS):
        asking, died = "", ""
        for said in _lines(entry, python, {**request, "answered": answered}):
            if "asking" in said:
                asking = said["asking"]
            elif "row" in said:
                row = Row.from_json(said["row"], subject=subject)
                answered.append(row.name)
                yield row
            elif "done" in said:
                return
            else:
                died = said["died"]
        if not asking:
            raise OracleError(f"{subject} could not be swept", said=died, next_step="assay oracles list")
        model, dtype, kv, invariance = asking.split("/")
        answered.append(asking)
        outcome = Outcome(verdict="different", where="raised", detail=f"the process died: {died.splitlines()[-1]}")
        yield Row(subject=subject, model=model, dtype=dtype, kv=kv, invariance=invariance, outcome=outcome)
    raise OracleError(f"{subject} died {DEATHS} times in one sweep", last=died, next_step="assay sweep with a pattern")


def _lines(entry: str, python: Path, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What one process says, then `died` with its last words unless it said that it was done."""
    with TemporaryDirectory(prefix="assay-sweep-", ignore_cleanup_errors=True) as folder:
        private = Path(folder)
        file = private / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        with (private / "stderr").open("wb") as stderr:
            child = subprocess.Popen(
                [python, "-m", entry, str(file)],
                cwd=REPOSITORY,
                env=hermetic(private),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            assert child.stdout is not None  # noqa: S101 - we asked for the pipe
            done = False
            for line in child.stdout:
                with contextlib.suppress(ValueError):  # a line torn by a death
                    said = json.loads(line)
                    done = done or "done" in said
                    yield said
            code = child.wait()
            if not done:
                words = (private / "stderr").read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
                yield {"died": "\n".join([*words, f"exit code {code}"])}
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            assert child.stdout is not None  # noqa: S101 - likewise
            child.stdout.close()
