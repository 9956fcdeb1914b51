"""`assay oracles list` and `assay oracles sync [NAME]`: the oracles and their environments.

Oracles on demand are listed as such, and built only where they are named.
"""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from oracles.environment import ensure_environment, environment_folder, is_ready
from oracles.registry import find_oracle, load_oracles


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser("oracles", help="what is believed, and the environments that it runs in")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="name, version, pins, state of the environment")
    listed.set_defaults(run=run)
    sync = actions.add_parser("sync", help="build each environment from its lock file but those on demand, or one")
    sync.add_argument("name", nargs="?", help="only this oracle")
    sync.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List the oracles, or build their environments.

    Raises:
        UsageError: There is no oracle of that name.
        OracleError: An environment cannot be built.
    """
    if args.action == "sync":
        chosen = [find_oracle(args.name)] if args.name else list(load_oracles().values())
        progress = Console(stderr=True, highlight=False, soft_wrap=True)
        for oracle in chosen:
            ensure_environment(oracle, on_line=progress.print)
    else:
        chosen = list(load_oracles(on_demand=True).values())
    rows = [
        {
            "name": oracle.name,
            "version": oracle.version,
            "pins": dict(oracle.pins),
            "ready": is_ready(oracle),
            "on_demand": oracle.on_demand,
            "environment": str(environment_folder(oracle)),
            "believed_for": oracle.believed_for,
        }
        for oracle in chosen
    ]
    if args.json:
        print(json.dumps({"oracles": rows}))
    else:
        _print(rows)
    return 0


def _print(rows: list[dict[str, Any]]) -> None:
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        for row in rows:
            pins = " ".join(f"{name}=={version}" for name, version in row["pins"].items())
            print(f"{row['name']} {row['version']}  {_state(row)}  {pins}")
        return
    table = Table("oracle", "version", "environment", "pins", "believed for")
    for row in rows:
        pins = "\n".join(f"{name} {version}" for name, version in row["pins"].items())
        table.add_row(row["name"], row["version"], _state(row), pins, row["believed_for"])
    console.print(table)


def _state(row: dict[str, Any]) -> str:
    return ("ready" if row["ready"] else "not built") + (", on demand" if row["on_demand"] else "")
