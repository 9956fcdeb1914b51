"""`assay cases [PATTERN]`: list the cases of the matrix."""

import argparse
import json

from rich.console import Console

from parity.console import aligned, show
from parity.matrix import load_cases, select
from parity.opt_in import opt_in_snapshots


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the verb."""
    parser = subparsers.add_parser("cases", help="list cases", description="List the cases of the matrix.")
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help="shell glob over case names")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List them, one a line; as JSON in full."""
    cases = select(load_cases(), args.pattern)
    if args.json:
        print(json.dumps({"cases": [case.to_json() for case in cases]}))
        return 0
    console = Console()
    opt_in = opt_in_snapshots()
    rows = [
        (
            case.name,
            f"{len(case.prompt_ids)} tokens",
            f"{case.num_steps} steps",
            case.tier,
            case.oracle,
            "opt-in" if case.snapshot in opt_in else "",
        )
        for case in cases
    ]
    for line in aligned(rows):
        show(console, line)
    return 0
