"""What every oracle's runner does around its own work: read a request, run its cases, write traces, say what happened.

Needs numpy and safetensors alone, since it runs inside an oracle's environment. The request:
`{"tasks": [{"case": ..., "snapshot": {"name", "path"}, "out": folder}, ...]}`. Into each `out` go `provenance.json`, then the
trace, whose `trace.json` comes last: a folder that has it is complete.

Guarantees: standard output carries events alone, a JSON object a line: `ready`, `started`, `finished` and `failed` (with
`kind` and `message`); whatever libraries print goes to standard error. A case that fails costs no other case. The process
ends as soon as its standard input closes, so it never outlives a parent that was killed.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from parity.atomic_file import write_atomically
from parity.case import Case
from parity.provenance import Provenance
from parity.trace import Trace

ORPHANED: Final = 3  # exit code when the parent is gone

Emit = Callable[..., None]
RunCase = Callable[[Case, Path], Trace]


def serve(request_file: str, start: Callable[[], tuple[RunCase, Provenance]]) -> int:
    """Run every task of a request; failures are events, not exit codes.

    Args:
        request_file: Path of the request.
        start: Imports the oracle, after standard output is safe; gives what runs a case on a snapshot's folder, and the
            provenance of this process.
    """
    emit = _claim_standard_output()
    _end_with_parent()
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    run_case, provenance = start()
    described = json.dumps(provenance.to_json(), indent=1).encode() + b"\n"
    emit("ready")
    for task in request["tasks"]:
        name = task["case"]["name"]
        emit("started", case=name)
        try:
            trace = run_case(Case.from_json(task["case"]), Path(task["snapshot"]["path"]))
            folder = Path(task["out"])
            write_atomically(folder / "provenance.json", described)
            trace.save(folder)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported for this case; some oracles' modules call exit()
            emit("failed", case=name, kind=type(error).__name__, message=str(error))
        else:
            emit("finished", case=name)
    return 0


def _claim_standard_output() -> Emit:
    """Keep standard output for events and send everything else that is printed to standard error."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **facts: object) -> None:
        events.write(json.dumps({"event": event, **facts}) + "\n")
        events.flush()

    return emit


def _end_with_parent() -> None:
    """End this process when standard input closes."""

    def watch() -> NoReturn:
        while os.read(0, 4096):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()
