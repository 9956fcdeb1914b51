"""A process that answers one JSON line per request: the child's side of every long-lived worker.

Guarantees: one answer a request, in order, on standard output, whatever else the process prints there (its own standard
output is moved to standard error first). An error that is the caller's becomes an answer with `error`; any other one ends
the process with its stack trace on standard error.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from parity.errors import AssayError

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer requests from standard input until it closes.

    Args:
        handlers: Operation name to a function of the whole request; it returns the answer.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with answers:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = handlers[request["op"]](request)
            except AssayError as error:
                answer = {"error": str(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
