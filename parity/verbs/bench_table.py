"""Modes of `assay bench` that measure the whole table or look back: `--full`, `--quick`, `--gate`, `--compare`, `--against`.

What they print for people is a table; with `--json` one object, `machine` and `figures` as the other modes give them, or for a
comparison `before`, `after` and `changes`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import history
from bench.compare import Change, compare
from bench.gate_ratio import measure_gate
from bench.machine import machine
from bench.page import page
from bench.preflight import complaints, preflight, to_json
from bench.run import run_table
from bench.suite import FULL, ON_REQUEST, QUICK, Size
from parity.atomic_file import write_atomically
from parity.console import aligned, show
from parity.engine_runner import EngineRunner
from parity.errors import UsageError

REPORTS: Final = Path("reports")


def run_table_of(args: argparse.Namespace) -> int:
    """Measure the full or the quick table, keep it in the history, and write the pages of a full one.

    Returns:
        0, or 1 where bits differ or something could not be measured.

    Raises:
        UsageError: A name is not one that a full table can be asked for, or the machine is too noisy for a full table and
            nobody said that this is all right.
    """
    size: Size = _with(args.snapshots) if args.full else QUICK
    console = Console(stderr=args.json)
    conditions = preflight()
    doubts = complaints(conditions)
    if doubts and args.full and not args.noisy:
        raise UsageError(
            "this machine is too noisy for headline figures",
            found="\n".join(doubts),
            next_step="wait until it is quiet, or measure anyway and have the result marked: assay bench --full --noisy",
        )
    for doubt in doubts:
        show(console, f"noisy  {doubt}")
    result = run_table(size, conditions, on_progress=partial(show, console))
    kept = history.append(
        history.history_file(history.identity(result["machine"]), size.name),
        figures=result["figures"],
        noisy=doubts,
        commit=history.current_commit(),
    )
    text = json.dumps(result, indent=1).encode() + b"\n"
    if args.full:
        folder = args.reports or REPORTS
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "bench.json", text)
        write_atomically(folder / "bench.md", page(result).encode())
    if args.output:
        write_atomically(args.output, text)
    if args.json:
        print(json.dumps(result))
    else:
        _print_figures(console, result["figures"])
        show(console, f"kept as {kept.label} of this machine, for --compare and --against")
    for name, reason in result["failures"].items():
        show(console, f"not measured: {name}: {reason}")
    identical = all(figure["bits_identical"] is not False for figure in result["figures"])
    return 0 if identical and not result["failures"] else 1


def _with(names: Sequence[str]) -> Size:
    """The full table, and the configurations of snapshots that are measured on request only."""
    on_request = list(dict.fromkeys(c.snapshot for c in ON_REQUEST))
    if unknown := [name for name in names if name not in on_request]:
        raise UsageError(
            "a full table has its own snapshots; names only add those that have terms of use",
            given=" ".join(unknown),
            known=", ".join(on_request),
            next_step=f"assay bench --full {on_request[0]}",
        )
    return replace(FULL, configurations=(*FULL.configurations, *(c for c in ON_REQUEST if c.snapshot in names)))


def run_gate(args: argparse.Namespace) -> int:
    """Check the matrix on kernels and on plain operations; 0, or 1 where verdicts differ."""
    console = Console(stderr=args.json)
    conditions = preflight()
    figures = measure_gate(args.gate or None, repeats=args.repeats or 1, on_progress=partial(show, console))
    about = {**described(), "preflight": to_json(conditions), "noisy": complaints(conditions)}
    result: dict[str, Any] = {"machine": about, "figures": [figure.to_json() for figure in figures]}
    if args.output:
        write_atomically(args.output, json.dumps(result, indent=1).encode() + b"\n")
    if args.json:
        print(json.dumps(result))
    else:
        _print_figures(console, result["figures"])
    return 0 if all(figure.bits_identical for figure in figures) else 1


def run_compare(args: argparse.Namespace) -> int:
    """Compare two runs of this machine's history; 0, or 1 where a figure is worse beyond noise.

    Raises:
        UsageError: A run is not there.
    """
    size = QUICK if args.quick else FULL
    runs = history.load(history.history_file(history.identity(described()), size.name))
    names = args.compare or (args.against, "last")
    before, after = (history.find(runs, name, is_on_main=history.is_on_main) for name in names)
    changes, alone = compare(before, after)
    if args.json:
        ends = {"before": before.label, "after": after.label}
        print(json.dumps({**ends, "changes": [change.to_json() for change in changes], "only_one": alone}))
    else:
        console = Console()
        show(console, f"{after.label} against {before.label}")
        for line in aligned([("figure", "peer", "before", "after", "change", "range", ""), *map(_row, changes)]):
            show(console, line)
        for name in alone:
            show(console, f"in one of the two alone: {name}")
        for run in (before, after):
            for doubt in run.noisy:
                show(console, f"{run.label} was noisy: {doubt}")
    return 1 if any(change.is_worse for change in changes) else 0


def described() -> dict[str, Any]:
    """This machine, with the packages that are measured."""
    return {**machine(), "packages": dict(EngineRunner().provenance().packages)}


def _row(change: Change) -> tuple[str, ...]:
    return (
        change.name,
        change.peer,
        f"{change.before:.3g}",
        f"{change.after:.3g}",
        f"{change.change:.3f}",
        f"{change.low:.3f}-{change.high:.3f}",
        change.word,
    )


def _print_figures(console: Console, figures: list[dict[str, Any]]) -> None:
    rows = [
        (
            f["name"],
            f"{f['engine']:.4g}",
            f["peer"],
            f"{f['peer_value']:.4g}",
            f["unit"],
            f"{f['ratio']:.3g}",
            f"{f['low']:.3g}-{f['high']:.3g}",
            {True: "identical", False: "DIFFERENT", None: "-"}[f["bits_identical"]],
        )
        for f in figures
    ]
    for line in aligned([("figure", "engine", "peer", "its value", "unit", "ratio", "range", "bits"), *rows]):
        show(console, line)
