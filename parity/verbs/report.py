"""`assay report`: the results on disk as one HTML page, as Markdown and as JSON; with `--golden` a golden to look at."""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from parity.atomic_file import write_atomically
from parity.console import show
from parity.errors import AssayError
from parity.reporting import results

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer
    from parity.reporting.results import Json


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the verb."""
    parser = subparsers.add_parser(
        "report",
        help="verdicts, differences and bench as a page",
        description="Put together what assay check, bench, mutate, sweep and explain have left on disk: report.html, "
        "report.md and report.json. With --golden look at one golden instead. It runs nothing and judges nothing.",
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the results lie (default: reports)")
    parser.add_argument("--into", type=Path, metavar="DIR", help="where to write (default: the same folder)")
    parser.add_argument("--golden", metavar="CASE", help="a page on this case's golden: prompt, steps, likeliest ids")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files and say where they are; 0.

    Raises:
        UsageError: There is nothing to report on, or no such golden.
    """
    # pandas and matplotlib take a second to load, which no other verb should pay
    from parity.reporting import page  # noqa: PLC0415
    from parity.reporting.facts import facts, read_results  # noqa: PLC0415

    folder = args.results or results.RESULTS
    into = args.into or folder
    if args.golden is not None:
        found = _golden(args.golden)
        into, stem = into / "goldens", args.golden.replace("/", "--")
        written = {".html": page.golden_html(found), ".md": page.golden_markdown(found)}
    else:
        found = facts(read_results(folder, history=_history(folder)), text_of=_text_of)
        stem = "report"
        written = {".html": page.html(found), ".md": page.markdown(found)}
    written[".json"] = json.dumps(found, indent=1, allow_nan=False) + "\n"
    files = {suffix.lstrip("."): into / f"{stem}{suffix}" for suffix in written}
    for suffix, text in written.items():
        write_atomically(files[suffix.lstrip(".")], text.encode())
    if args.json:
        print(json.dumps({kind: str(file) for kind, file in files.items()}))
    else:
        for file in files.values():
            show(Console(), str(file))
    return 0


def _golden(name: str) -> "Json":
    """Facts of a case's golden.

    Raises:
        UsageError: There is no such case.
        GoldenError: It has no golden on this platform, or one that cannot be believed.
    """
    from parity.golden_view import GoldenView, golden_of  # noqa: PLC0415 - as above
    from parity.reporting.golden_facts import golden_facts  # noqa: PLC0415

    golden = golden_of(name)
    case = golden.case
    tokenizer = _tokenizer(case.snapshot)
    return golden_facts(
        GoldenView.of(golden),
        text_of=_text_of,
        prompt_text=None if tokenizer is None else tokenizer.decode(case.prompt_ids, special=True),
    )


def _history(folder: Path) -> "list[Json]":
    """Rows of the bench history of the machine and the size that `bench.json` names; none where it names none."""
    from bench.history import history_file, identity, load, rows  # noqa: PLC0415 - as above

    machine = (results.load(folder / "bench.json") or {}).get("machine", {})
    if not {"processor", "cores", "packages", "size"} <= set(machine):
        return []
    return rows(load(history_file(identity(machine), machine["size"])))


def _text_of(snapshot: str, token_id: int) -> str | None:
    """A token's text, where the snapshot is here and has a tokenizer: a report fetches nothing."""
    tokenizer = _tokenizer(snapshot)
    return None if tokenizer is None else tokenizer.decode([token_id], special=True)


@cache
def _tokenizer(snapshot: str) -> "Tokenizer | None":
    from engine.errors import EngineError  # noqa: PLC0415
    from engine.tokenizer import Tokenizer  # noqa: PLC0415
    from parity.models.fetch import snapshot_path  # noqa: PLC0415

    try:
        return Tokenizer.open(snapshot_path(snapshot))
    except (AssayError, EngineError):
        return None
