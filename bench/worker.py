"""The parent's side of a worker process: start it, ask it, end it."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from parity.errors import AssayError

ROOT = Path(__file__).resolve().parent.parent


class Worker(AbstractContextManager["Worker"]):
    """A peer that answers requests, one JSON line each.

    Args:
        name: What figures call it.
        command: Program and arguments.
        environment: Added to, or with `hermetic` instead of, this process's own.
        hermetic: Pass nothing on.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, hermetic: bool = False
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=dict(environment) if hermetic else {**os.environ, **environment},
        )

    def ask(self, **request: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON values
        """Send a request and wait for its answer.

        Raises:
            AssayError: The worker refused the request, or died.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("started with pipes")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            _, stderr = self._process.communicate()
            raise AssayError(
                f"the {self.name} worker died",
                request=request.get("op"),
                exit_code=self._process.returncode,
                last_lines="\n".join(stderr.strip().splitlines()[-5:]) or "nothing",
                next_step="run the same command again; if it dies again, report the last lines",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AssayError(f"the {self.name} worker refused", reason=answer["error"], next_step="mend the request")
        return answer

    def __enter__(self) -> Self:
        """Return itself; the process runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
