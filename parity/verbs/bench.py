"""`assay bench`: load time, prefill and decode throughput of the engine beside mlx-lm's, from one interleaved run."""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from bench.interleave import Figure, Workload, measure
from bench.machine import machine
from bench.worker import Worker
from engine.dtype import DTypeName
from oracles.environment import ensure_environment
from oracles.process import hermetic
from oracles.registry import find_oracle
from parity.atomic_file import write_atomically
from parity.console import aligned, show
from parity.engine_runner import EngineRunner
from parity.errors import UsageError
from parity.models.fetch import ensure_snapshot

SNAPSHOTS = ("smollm2-135m", "smollm2-135m-f32", "smollm2-135m-q4")
PEER = "mlx-lm"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="throughput of the engine beside mlx-lm",
        description="Measure engine and mlx-lm alternately in one run; ratios with their range, bits compared.",
        epilog="example: assay bench smollm2-135m --dtype bf16 --prompts 32,256 --tokens 16 --repeats 5",
    )
    parser.add_argument("snapshots", nargs="*", default=list(SNAPSHOTS), help=f"names ({', '.join(SNAPSHOTS)})")
    parser.add_argument("--dtype", choices=get_args(DTypeName), default="f32", help="dtype to compute in (f32)")
    parser.add_argument("--prompts", default="32", metavar="N,N", help="prompt lengths (32)")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="tokens generated after each prompt (16)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs a figure (5)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 0, or 1 where the two sides' logits were not the same bits."""
    prompts = _lengths(args)
    identity = machine()
    console = Console(stderr=args.json)
    oracle = find_oracle(PEER)
    python = ensure_environment(oracle, on_line=console.print)
    workloads = [_workload(name, args, prompts) for name in args.snapshots]
    figures: list[Figure] = []
    with ExitStack() as stack:
        private = Path(stack.enter_context(TemporaryDirectory(prefix="assay-bench-")))
        engine = stack.enter_context(Worker("engine", [sys.executable, "-m", "bench.engine_worker"], {}))
        peer = stack.enter_context(
            Worker(PEER, [str(python), "-m", "oracles.mlx_lm.bench_worker"], hermetic(private), hermetic=True)
        )
        for work in workloads:
            figures += measure(work, engine, peer, on_progress=console.print)
    result = {
        "machine": {**identity, "packages": dict(EngineRunner().provenance().packages), PEER: oracle.version},
        "figures": [figure.to_json() for figure in figures],
    }
    if args.output:
        write_atomically(args.output, json.dumps(result, indent=1).encode() + b"\n")
    if args.json:
        print(json.dumps(result))
    else:
        print_table(console, figures, identity, oracle.version)
    return 0 if all(figure.bits_identical is not False for figure in figures) else 1


def print_table(console: Console, figures: list[Figure], identity: dict[str, Any], version: str) -> None:
    """One line a figure; the range of the ratio is over its pairs."""
    columns = ("figure", "engine", f"{PEER} {version}", "unit", "ratio", "range", "bits")
    rows = [_row(figure) for figure in figures]
    if console.is_terminal:
        table = Table()
        for column in columns:
            table.add_column(column, no_wrap=True, justify="left" if column in ("figure", "unit", "bits") else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for line in aligned([columns, *rows]):
            show(console, line)
    show(
        console, f"{identity['processor']}, {identity['cores']} cores, load {identity['load_before'][0]} before the run"
    )


def _row(f: Figure) -> tuple[str, ...]:
    return (
        f.name,
        f"{f.engine.median:.2f}",
        f"{f.peer_value.median:.2f}",
        f.unit,
        f"{f.ratio.median:.2f}",
        f"{f.ratio.low:.2f}-{f.ratio.high:.2f}",
        {True: "identical", False: "DIFFERENT", None: "-"}[f.bits_identical],
    )


def _lengths(args: argparse.Namespace) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in args.prompts.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(*lengths, args.tokens - 1, args.repeats) < 1:
        raise UsageError(
            "nothing to measure",
            prompts=args.prompts,
            tokens=args.tokens,
            repeats=args.repeats,
            next_step="give --prompts 32,256 (1 or more each), --tokens 2 or more, --repeats 1 or more",
        )
    return lengths


def _workload(name: str, args: argparse.Namespace, prompts: tuple[int, ...]) -> Workload:
    snapshot = ensure_snapshot(name)
    return Workload(
        snapshot=snapshot.name,
        folder=str(snapshot.path),
        vocabulary=int(snapshot.config["vocab_size"]),
        dtype=args.dtype,
        prompts=prompts,
        num_tokens=args.tokens,
        repeats=args.repeats,
    )
