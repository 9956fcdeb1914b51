"""`assay models`: list the known snapshots, fetch one, tell where one lies."""

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from parity.errors import UsageError
from parity.home import assay_home
from parity.matrix import load_cases
from parity.models.catalogue import Entry, GgufPartsSource, entries
from parity.models.fetch import ensure_snapshot, is_complete, models_folder, snapshot_path
from parity.models.tiny_catalogue import TinySource
from parity.opt_in import opt_in_snapshots
from parity.progress import LongWork
from parity.snapshot import NO_MODEL, Snapshot

NAME_HELP = "a name of `assay models list`, a folder written with a slash, or hub:org/name[@revision]"
COLUMNS = ("name", "dtype", "licence", "source", "here", "title")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb `models` with `list`, `fetch` and `path`."""
    parser = subparsers.add_parser("models", help="known snapshots: list, fetch, path")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,fetch,path}")
    actions.add_parser("list", help="known snapshots, and which of them are on this machine")
    fetch = actions.add_parser("fetch", help="build or download a snapshot and check every digest")
    fetch.add_argument("names", nargs="*", metavar="NAME", help=f"{NAME_HELP}; without one, all that the cases use")
    fetch.add_argument("--again", action="store_true", help="make it anew even if it is there")
    fetch.add_argument(
        "--accept-terms", action="store_true", help="accept the terms of use of the named snapshots that have some"
    )
    path = actions.add_parser("path", help="print the folder of a snapshot that is on this machine")
    path.add_argument("name", metavar="NAME", help=NAME_HELP)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; 0 or an AssayError."""
    if args.action == "list":
        return _list(as_json=args.json)
    if args.action == "fetch":
        names = args.names or _default_names(accept_terms=args.accept_terms)
        # Progress goes to standard error, so that standard output holds the result alone.
        console = Console(stderr=True, highlight=False)
        with LongWork("fetch", unit="snapshots", total=len(names), console=console) as work:
            snapshots = [_fetch(name, again=args.again, accept_terms=args.accept_terms, work=work) for name in names]
        _print_fetched(snapshots, as_json=args.json)
        return 0
    path = snapshot_path(args.name)
    print(json.dumps({"name": args.name, "path": str(path)}) if args.json else path)
    return 0


def _list(*, as_json: bool) -> int:
    models = models_folder(assay_home())
    here = {name: is_complete(models / name, entry.files) for name, entry in entries().items()}
    if as_json:
        rows = [_row(entry) | {"here": here[name]} for name, entry in entries().items()]
        print(json.dumps({"snapshots": rows}))
        return 0
    rows = [_row(entry) | {"here": "yes" if here[name] else "no"} for name, entry in entries().items()]
    if sys.stdout.isatty():
        table = Table()
        for column in COLUMNS:
            table.add_column(column, no_wrap=column == "name", overflow="fold")
        for row in rows:
            table.add_row(*(str(row[column]) for column in COLUMNS))
        Console().print(table)
    else:
        _print_plain([dict(zip(COLUMNS, COLUMNS, strict=True)), *rows])
    return 0


def _default_names(*, accept_terms: bool) -> tuple[str, ...]:
    """Every snapshot of the cases but the opt-in ones, which have to be named.

    Raises:
        UsageError: Terms are accepted, and it is not said whose.
    """
    if accept_terms:
        having = ", ".join(entry.name for entry in entries().values() if entry.terms is not None)
        raise UsageError(
            "--accept-terms needs the name of a snapshot",
            having_terms=having,
            next_step="assay models fetch NAME --accept-terms",
        )
    used = tuple(dict.fromkeys(case.snapshot for case in load_cases() if case.snapshot != NO_MODEL.name))
    opt_in = [name for name in used if name in opt_in_snapshots()]
    if opt_in:
        _to_stderr(f"left out: {', '.join(opt_in)} (opt-in: assay models fetch NAME --accept-terms)")
    return tuple(name for name in used if name not in opt_in)


def _fetch(name: str, *, again: bool, accept_terms: bool, work: LongWork) -> Snapshot:
    snapshot = ensure_snapshot(name, again=again, accept_terms=accept_terms, report=work.doing)
    work.tell("ready", name)
    return snapshot


def _print_fetched(snapshots: list[Snapshot], *, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "name": snapshot.name,
                "path": str(snapshot.path),
                "repo_id": snapshot.repo_id,
                "revision": snapshot.revision,
                "files": dict(snapshot.files),
            }
            for snapshot in snapshots
        ]
        print(json.dumps({"snapshots": rows}))
        return
    for snapshot in snapshots:
        for file, digest in snapshot.files.items():
            print(f"{digest}  {file}")
        print(snapshot.path)


def _row(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "licence": entry.licence,
        "source": _source(entry),
        "title": entry.title,
    }


def _source(entry: Entry) -> str:
    source = entry.source
    if isinstance(source, TinySource):
        return f"seed {source.seed}"
    if isinstance(source, GgufPartsSource):
        first, *others = source.parts
        return f"{first.package} {first.version} and {len(others)} more"
    return f"{source.wheel.package} {source.wheel.version}"


def _print_plain(rows: list[dict[str, object]]) -> None:
    widths = {column: max(len(str(row[column])) for row in rows) for column in COLUMNS}
    for row in rows:
        print("  ".join(f"{row[column]!s:<{widths[column]}}" for column in COLUMNS).rstrip())


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
