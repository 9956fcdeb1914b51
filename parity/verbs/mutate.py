"""`assay mutate [PATTERN]`: plant faults in the engine one at a time, and see whether the goldens catch them."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from parity.console import aligned, show
from parity.errors import UsageError
from parity.progress import LongWork
from parity.reporting import results

if TYPE_CHECKING:
    from parity.mutation.fault import Fault
    from parity.mutation.run import Mutation


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "mutate",
        help="seed faults into the engine; report caught and localised",
        description="Plant faults in the running engine, one at a time: each must be seen by a committed golden, first in the "
        "module that it is in. The case that saw it is run once more without it. Sources are not touched. "
        "Exit code 0: all caught and no false alarm; 1: not; 2: the request cannot be met.",
        epilog="example: assay mutate 'rope-*' --jobs 1",
    )
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help="shell glob over names of faults")
    parser.add_argument("--sample", type=_count, metavar="N", help="try N of them, every kind before any kind twice")
    parser.add_argument("--jobs", type=_count, metavar="N", help="worker processes (default: one a processor)")
    parser.add_argument("--list", action="store_true", help="list the faults, and try none")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="leave mutation.json and mutation.md here (default: reports, once all faults were tried)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Try faults, report, decide.

    Raises:
        UsageError: No fault matches.
    """
    from parity.mutation.report import save, to_json  # noqa: PLC0415 - brings mlx
    from parity.mutation.run import chosen, mutate  # noqa: PLC0415

    faults = chosen(args.pattern, args.sample)
    if args.list:
        return _list(faults, as_json=args.json)
    if args.results is not None and args.results.exists() and not args.results.is_dir():
        raise UsageError("the report cannot be written", folder=args.results, next_step="name a folder")
    jobs = args.jobs or os.cpu_count() or 1
    with LongWork("mutate", unit="faults", total=len(faults), console=Console(stderr=True)) as work:
        mutation = mutate(
            faults,
            jobs=jobs,
            on_outcome=lambda o: work.tell(
                o.fate.value, o.fault, notable=o.fate.value != "CAUGHT" or o.misplaced or o.false_alarm
            ),
        )
    if args.json:
        print(json.dumps(to_json(mutation)))
    else:
        _print(mutation)
    if args.results is not None or (args.pattern is None and args.sample is None):
        save(mutation, args.results or results.RESULTS)
    return 0 if mutation.passes else 1


def _print(mutation: "Mutation") -> None:
    """The table by kind, the message of every fault that is not as it must be, and one closing line."""
    from parity.mutation.report import COLUMNS, closing, messages, summary  # noqa: PLC0415

    console = Console()
    for line in aligned([COLUMNS, *summary(mutation)]):
        show(console, line)
    for message in messages(mutation):
        show(console, "")
        show(console, message, style="red")
    show(console, "")
    show(console, closing(mutation), style="green" if mutation.passes else "red")


def _list(faults: "tuple[Fault, ...]", *, as_json: bool) -> int:
    if as_json:
        rows = [{"fault": f.name, "kind": f.kind, "says": f.says, "at": f.at, "cases": list(f.cases)} for f in faults]
        print(json.dumps({"faults": rows}))
    else:
        for line in aligned([(fault.name, fault.at, fault.says) for fault in faults]):
            show(Console(), line)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
