"""`assay bench`: load time, prefill and decode throughput of the engine beside mlx-lm's, from one interleaved run.

With `--samplers` draws a second of each sampler instead, on generated rows: no snapshot is needed. `--full` and `--quick`
measure a table of snapshots, prompts and peers, `--gate` the matrix of cases, `--compare` and `--against` look back: those are
in `bench_table`.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from bench.interleave import Figure, Workload, measure
from bench.machine import machine
from bench.samplers import Drawing, measure_samplers
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
PROMPTS, TOKENS = "32", 16
REPEATS = 5


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="throughput of the engine beside mlx-lm",
        description="Measure engine and mlx-lm alternately in one run; ratios with their range, bits compared.",
        epilog="example: assay bench smollm2-135m --dtype bf16 --prompts 32,256 --tokens 16 --repeats 5",
    )
    # None marks what was not given: --samplers takes none of these
    parser.add_argument("snapshots", nargs="*", help=f"names ({', '.join(SNAPSHOTS)})")
    parser.add_argument("--samplers", action="store_true", help="draws a second of each sampler, on generated f32 rows")
    parser.add_argument("--dtype", choices=get_args(DTypeName), help="dtype to compute in (f32)")
    parser.add_argument("--prompts", metavar="N,N", help=f"prompt lengths ({PROMPTS})")
    parser.add_argument("--tokens", type=int, metavar="N", help=f"tokens generated after each prompt ({TOKENS})")
    parser.add_argument("--repeats", type=int, metavar="N", help="pairs a figure (5; with --gate 1)")
    parser.add_argument(
        "--full",
        action="store_true",
        help="the whole table with all peers, into reports/; about 20 minutes; names add snapshots that have terms of use",
    )
    parser.add_argument("--quick", action="store_true", help="a small table, about two minutes")
    parser.add_argument(
        "--noisy", action="store_true", help="with --full: measure on a noisy machine, and mark the result"
    )
    parser.add_argument("--reports", type=Path, metavar="DIR", help="with --full: where the pages go (reports)")
    parser.add_argument(
        "--gate", nargs="?", const="", metavar="PATTERN", help="check the matrix on kernels and on plain operations"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="runs of this machine: a number, last, last~1, main"
    )
    parser.add_argument("--against", metavar="A", help="the last run compared with an earlier one, such as main")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 0, or 1 where the two sides' logits were not the same bits or their draws the same ids.

    Raises:
        UsageError: The options measure nothing, or do not go together.
    """
    if _mode(args) is not None:
        return _run_mode(args)
    args.repeats = REPEATS if args.repeats is None else args.repeats
    _check(args)
    identity = machine()
    console = Console(stderr=args.json)
    oracle = find_oracle(PEER)
    python = ensure_environment(oracle, on_line=console.print)
    names = [] if args.samplers else args.snapshots or SNAPSHOTS
    workloads = [_workload(name, args) for name in names]
    figures: list[Figure] = []
    with ExitStack() as stack:
        private = Path(stack.enter_context(TemporaryDirectory(prefix="assay-bench-")))
        environment = hermetic(private)
        engine = stack.enter_context(Worker("engine", [sys.executable, "-m", "bench.engine_worker"], {}))
        peer = stack.enter_context(
            Worker(PEER, [str(python), "-m", "oracles.mlx_lm.bench_worker"], environment, hermetic=True)
        )
        for work in workloads:
            figures += measure(work, engine, peer, on_progress=console.print)
        if args.samplers:
            figures += measure_samplers(Drawing(repeats=args.repeats), engine, peer, on_progress=partial(show, console))
    # without mx.compile the peer is slower than its users know it: a ratio has to say so
    switches = {name: value for name, value in environment.items() if name.startswith("MLX_")}
    packages = dict(EngineRunner().provenance().packages)
    result = {
        "machine": {**identity, "packages": packages, PEER: oracle.version, "peer_switches": switches},
        "figures": [figure.to_json() for figure in figures],
    }
    if args.output:
        write_atomically(args.output, json.dumps(result, indent=1).encode() + b"\n")
    if args.json:
        print(json.dumps(result))
    else:
        print_table(console, figures, identity, oracle.version, switches)
    return 0 if all(figure.bits_identical is not False for figure in figures) else 1


def _mode(args: argparse.Namespace) -> str | None:
    """The mode that was asked for beside measuring named snapshots.

    Raises:
        UsageError: Two that do not go together.
    """
    looks_back = args.compare is not None or args.against is not None
    modes = {
        "--full": args.full,
        "--quick": args.quick and not looks_back,
        "--gate": args.gate is not None,
        "--compare": args.compare is not None,
        "--against": args.against is not None,
    }
    chosen = [name for name, given in modes.items() if given]
    names = [] if args.full else args.snapshots
    others = [*names, *(f"--{n}" for n in ("samplers", "dtype", "prompts", "tokens") if getattr(args, n))]
    if len(chosen) > 1 or (chosen and others):
        raise UsageError(
            "these ways to bench do not go together",
            given=" ".join([*chosen, *others]),
            next_step=f"assay bench {chosen[0]}",
        )
    return chosen[0] if chosen else None


def _run_mode(args: argparse.Namespace) -> int:
    from parity.verbs import bench_table  # noqa: PLC0415 - brings the kernels' compiler and converters

    if args.compare is not None or args.against is not None:
        return bench_table.run_compare(args)
    if args.gate is not None:
        return bench_table.run_gate(args)
    return bench_table.run_table_of(args)


def print_table(
    console: Console, figures: list[Figure], identity: dict[str, Any], version: str, switches: Mapping[str, str]
) -> None:
    """One line a figure; the range of the ratio is over its pairs. `switches` are the peer's."""
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
    show(console, f"{PEER} ran with {', '.join(f'{name}={value}' for name, value in switches.items()) or 'no switch'}")


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


def _check(args: argparse.Namespace) -> None:
    """Fill in what was not given, and refuse what measures nothing."""
    if args.samplers:
        _check_samplers(args)
        return
    args.dtype = args.dtype or "f32"
    args.prompts = PROMPTS if args.prompts is None else args.prompts
    args.tokens = TOKENS if args.tokens is None else args.tokens
    try:
        lengths = _lengths(args.prompts)
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


def _check_samplers(args: argparse.Namespace) -> None:
    given = [
        *args.snapshots,
        *(f"--{name} {value}" for name in ("dtype", "prompts", "tokens") if (value := getattr(args, name)) is not None),
    ]
    if given:
        raise UsageError(
            "--samplers draws from generated f32 rows, without a snapshot",
            given=" ".join(given),
            takes="--repeats, --output",
            next_step="assay bench --samplers",
        )
    if args.repeats < 1:
        raise UsageError("nothing to measure", repeats=args.repeats, next_step="give --repeats 1 or more")


def _lengths(prompts: str) -> tuple[int, ...]:
    return tuple(int(part) for part in prompts.split(","))


def _workload(name: str, args: argparse.Namespace) -> Workload:
    snapshot = ensure_snapshot(name)
    return Workload(
        snapshot=snapshot.name,
        folder=str(snapshot.path),
        vocabulary=int(snapshot.config["vocab_size"]),
        dtype=args.dtype,
        prompts=_lengths(args.prompts),
        num_tokens=args.tokens,
        repeats=args.repeats,
    )
