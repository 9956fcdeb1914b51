"""The runner of mlx-optiq: `python -m oracles.mlx_optiq.run REQUEST.json` in its environment, from the repository root.

Rows of a model come from mlx-lm's loader and loop, as they stand after the patches of the case's KV mode; draws from
mlx-optiq's own engine. Request, traces and events are those of `oracles.runner_loop`. The provenance's switches name the patch
set under `patches`.

Guarantees: one patch set a process. A request whose cases need several is handed on, one process after the other, each with the
tasks of one set; they say what happened on this process's standard output and end with its standard input.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from oracles.mlx_lm.run import Models
from oracles.mlx_optiq.patches import Installed, install, patch_set
from oracles.runner_loop import RunCase, serve
from parity.case import Case
from parity.kv import KV
from parity.provenance import Provenance
from parity.trace import Trace

PACKAGES: Final = ("mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "mlx-optiq")


class TilesIgnoredError(Exception):
    """Tiled attention was asked for and never ran."""


def start(kv: KV) -> tuple[RunCase, Provenance]:
    """Import mlx-optiq, which takes seconds and patches mlx-lm, and install what the KV mode needs."""
    installed = install(kv)
    import mlx.core as mx  # noqa: PLC0415 - as the docstring says

    from oracles.mlx_lm.capture import capture  # noqa: PLC0415 - likewise, and after the patches
    from oracles.mlx_optiq.batch import capture_quantized_batch  # noqa: PLC0415 - likewise
    from oracles.mlx_optiq.sampling import sample  # noqa: PLC0415 - likewise

    provenance = Provenance.capture(PACKAGES, device=mx.default_device().type.name)
    switches = dict(sorted({**provenance.switches, "patches": "; ".join(installed.patches)}.items()))
    models = Models(watching_tiles(capture, installed), sample, capture_quantized_batch)
    return models.run, replace(provenance, switches=switches)


def watching_tiles(capture: Callable[[Case, Any], Trace], installed: Installed) -> Callable[[Case, Any], Trace]:
    """`capture`, refusing a case that asked for tiles and got none.

    Raises (when it is called):
        TilesIgnoredError: As it says.
    """

    def watched(case: Case, model: Any) -> Trace:  # noqa: ANN401 - mlx-lm's modules have no types
        before = installed.tiles_run()
        trace = capture(case, model)
        if (installed.tiles_run() > before) != (case.kv.tile is not None):
            raise TilesIgnoredError(f"{case.kv.name}: tiled attention ran {installed.tiles_run() - before} times")
        return trace

    return watched


def by_patch_set(tasks: list[dict[str, Any]]) -> list[tuple[KV, list[dict[str, Any]]]]:
    """The tasks of each patch set, with a KV mode that needs it; sets in the order of their first task."""
    sets: dict[tuple[str, ...], tuple[KV, list[dict[str, Any]]]] = {}
    for task in tasks:
        kv = KV.parse(task["case"]["kv"])
        sets.setdefault(patch_set(kv), (kv, []))[1].append(task)
    return list(sets.values())


def main(request_file: str) -> int:
    """Run a request, here or in a process for each patch set; the first exit code that is not 0, else 0."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    sets = by_patch_set(request["tasks"])
    if len(sets) <= 1:
        return serve(request_file, lambda: start(sets[0][0] if sets else KV()))
    for number, (_, tasks) in enumerate(sets):
        part = Path(request_file).with_name(f"request-{number}.json")
        part.write_text(json.dumps({"tasks": tasks}), encoding="utf-8")
        if code := subprocess.run([sys.executable, "-m", "oracles.mlx_optiq.run", str(part)], check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
