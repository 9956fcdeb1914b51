"""`assay check [PATTERN]`: run the engine, judge it against the goldens, gate."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from parity.atomic_file import write_atomically
from parity.console import report, show
from parity.deviations import load_deviations
from parity.errors import UsageError
from parity.family_table import Judged, belongs, family_table, replace_block
from parity.gate import OnVerdict, check, exit_code
from parity.github import annotations
from parity.golden import GOLDENS, Golden, golden_path
from parity.golden_folder import golden_version
from parity.junit import junit_xml
from parity.matrix import placed_cases
from parity.opt_in import choose
from parity.platform_key import platform_key
from parity.snapshot import Snapshot
from parity.trace import Runner
from parity.verdict import Status, Verdict, counts


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the verb."""
    parser = subparsers.add_parser(
        "check",
        help="run the engine, judge it against the goldens",
        description="Run the engine over cases and judge every trace against its golden. "
        "Exit code 0: all identical, or different as declared; 1: not; 2: the request cannot be met.",
    )
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help="shell glob over case names")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML here")
    parser.add_argument("--github", action="store_true", help="print annotations for a GitHub workflow")
    parser.add_argument("--jobs", type=_jobs, metavar="N", help="worker processes (default: one a processor)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="keep every trace here, for assay diff")
    parser.add_argument(
        "--families", type=Path, metavar="FILE", help="rewrite the table of families in this Markdown file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, report, decide."""
    placed = placed_cases()
    chosen = choose((case for case, _ in placed), args.pattern)
    cases = chosen.cases
    if args.junit is not None and (args.junit.is_dir() or not args.junit.absolute().parent.is_dir()):
        raise UsageError(
            "the JUnit report cannot be written", file=args.junit, next_step="name a file in a folder that exists"
        )
    errors = Console(stderr=True)
    with _progress(errors) as progress:
        verdicts = check(
            cases,
            engine_runner,
            find_snapshot=find_snapshot,
            every_name=frozenset(case.name for case, _ in placed),
            pattern=args.pattern,
            deviations=load_deviations(),
            jobs=args.jobs or os.cpu_count() or 1,
            traces=args.traces,
            on_verdict=_teller(errors, progress, len(cases)),
        )
    if args.json:
        print(json.dumps({"counts": counts(verdicts), "cases": [verdict.to_json() for verdict in verdicts]}))
    else:
        report(Console(), verdicts)
    if chosen.line:
        show(errors if args.json else Console(), chosen.line)
    if args.github:
        places = {case.name: place for case, place in placed}
        for line in annotations(verdicts, places):
            print(line, file=sys.stderr if args.json else sys.stdout)
    if args.junit is not None:
        write_atomically(args.junit, junit_xml(verdicts))
    if args.families is not None:
        table = family_table(_judged(verdicts))
        write_atomically(args.families, replace_block(args.families.read_text(encoding="utf-8"), table).encode())
    return exit_code(verdicts)


def _judged(verdicts: tuple[Verdict, ...]) -> Iterator[Judged]:
    """What the table of families needs: each case with its verdict and its golden's cache words."""
    for verdict in verdicts:
        if verdict.case is not None and belongs(verdict.case):
            version = golden_version(verdict.case.oracle, GOLDENS, platform_key())
            file = golden_path(verdict.case, version=version or "")
            cache = Golden.load(file).cache if file.exists() else ()
            yield Judged(case=verdict.case, cache=cache, status=verdict.status.value)


def engine_runner() -> Runner:
    """The reference engine; called in each worker process, so that none but they load mlx."""
    from parity.engine_runner import EngineRunner  # noqa: PLC0415

    return EngineRunner()


def find_snapshot(name: str) -> Snapshot:
    """The snapshot of this name, fetched or generated where it is not there yet."""
    from parity.models.fetch import ensure_snapshot  # noqa: PLC0415 - brings converters that few commands need

    return ensure_snapshot(name)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("check"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[last]}", markup=False))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _teller(console: Console, progress: Progress, total: int) -> OnVerdict:
    """A bar on a terminal; elsewhere a line for every tenth of the work and for every case that is not identical."""
    task = progress.add_task("check", total=total, last="")

    def tell(done: int, total: int, verdict: Verdict) -> None:
        progress.update(task, completed=done, last=verdict.name)
        if console.is_terminal:
            return
        if verdict.status is not Status.IDENTICAL or done * 10 // total > (done - 1) * 10 // total:
            show(console, f"{done} of {total}  {verdict.status.value}  {verdict.name}")

    return tell


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
