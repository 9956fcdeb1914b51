"""A whole run of the table: machine, workers, configurations one after the other, and what is left where one fails.

Guarantees: each configuration has workers of its own, so that a death costs that configuration alone; it is told under
`failures`. What was measured is kept until the run has ended: a run that was broken off goes on where it stopped, on the same
commit and machine, and says so. The result is the one object that `--json` prints.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.history import current_commit, identity
from bench.interleave import Figure
from bench.llama_gguf import gguf_file
from bench.machine import machine
from bench.peers import LLAMA_CPP, MLX_LM, engine_worker, peer_worker, versions
from bench.preflight import Condition, complaints, to_json
from bench.startup import measure_startup
from bench.suite import ENGINE, Configuration, Loaded, Size, measure_configuration
from engine.kernels.level import cores
from oracles.process import hermetic
from parity.atomic_file import write_atomically
from parity.engine_runner import EngineRunner, weights_name
from parity.errors import AssayError
from parity.home import assay_home
from parity.models.fetch import ensure_snapshot

STARTUP: Final = "startup"
STARTS: Final = 2


def run_table(size: Size, conditions: list[Condition], *, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure a table.

    Args:
        size: How much.
        conditions: What the machine was like before, kept with the figures.
        on_progress: Told in a line each what has been done.

    Returns:
        `machine`, `figures`, and `failures`: name to reason.
    """
    described = _machine(size, conditions)
    unfinished = assay_home() / "bench" / f"unfinished-{size.name}.json"
    same = {"commit": current_commit(), "machine": identity(described)}
    kept = _kept(unfinished, same, on_progress)
    failures: dict[str, str] = {}
    for where, measure in _parts(size, on_progress).items():
        if where in kept:
            continue
        try:
            kept[where] = [figure.to_json() for figure in measure()]
        except AssayError as error:
            failures[where] = " ".join(str(error).split())
            on_progress(f"not measured: {where}\n{error}")
            continue
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(unfinished, json.dumps({**same, "figures": kept}).encode())
    unfinished.unlink(missing_ok=True)
    figures = [figure for where in kept for figure in kept[where]]
    return {"machine": described, "figures": figures, "failures": failures}


def _parts(size: Size, on_progress: Callable[[str], None]) -> dict[str, Callable[[], list[Figure]]]:
    parts: dict[str, Callable[[], list[Figure]]] = {}
    if size.startup:
        parts[STARTUP] = partial(_startup, size.configurations[0], on_progress)
    for configuration in size.configurations:
        parts[configuration.where] = partial(_configuration, configuration, size, on_progress)
    return parts


def _configuration(configuration: Configuration, size: Size, on_progress: Callable[[str], None]) -> list[Figure]:
    snapshot = ensure_snapshot(configuration.snapshot)
    with ExitStack() as stack:
        private = Path(stack.enter_context(TemporaryDirectory(prefix="assay-bench-")))
        workers = {ENGINE: stack.enter_context(engine_worker())}
        for name in (MLX_LM, *((LLAMA_CPP,) if configuration.llama else ())):
            folder = private / name
            folder.mkdir()
            workers[name] = stack.enter_context(peer_worker(name, folder, on_progress))
        at = Loaded(
            configuration=configuration,
            folder=snapshot.path,
            weights_name=weights_name(snapshot, configuration.dtype),
            vocabulary=int(snapshot.config["vocab_size"]),
            gguf=gguf_file(snapshot) if configuration.llama else None,
            scratch=private,
        )
        return measure_configuration(at, size, workers, threads=cores(), on_progress=on_progress)


def _startup(configuration: Configuration, on_progress: Callable[[str], None]) -> list[Figure]:
    snapshot = ensure_snapshot(configuration.snapshot)
    with TemporaryDirectory(prefix="assay-bench-") as private:
        figures = measure_startup(
            configuration.where,
            engine_worker,
            partial(peer_worker, MLX_LM, Path(private), on_progress),
            peer_name=MLX_LM,
            load={"op": "load", "snapshot": str(snapshot.path), "dtype": configuration.dtype},
            name=weights_name(snapshot, configuration.dtype),
            scratch=Path(private),
            repeats=STARTS,
        )
    on_progress("started, cold and warm")
    return figures


def _machine(size: Size, conditions: list[Condition]) -> dict[str, Any]:
    provenance = EngineRunner().provenance()
    switches = {name: value for name, value in hermetic(Path()).items() if name.startswith("MLX_")}
    known = versions()
    return {
        **machine(),
        "size": size.name,
        "packages": dict(provenance.packages),
        "kernels": provenance.switches["ASSAY_KERNELS"],
        "threads": cores(),
        "peers": known,
        MLX_LM: known[MLX_LM],
        "peer_switches": switches,
        "preflight": to_json(conditions),
        "noisy": complaints(conditions),
    }


def _kept(file: Path, same: dict[str, Any], on_progress: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
    """What a run that was broken off has measured; nothing where it measured something else."""
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    if {key: raw.get(key) for key in same} != same:
        return {}
    figures: dict[str, list[dict[str, Any]]] = raw["figures"]
    on_progress(f"going on with a run that was broken off: {', '.join(figures)} measured before")
    return figures
