"""`assay check [PATTERN]`: run the engine, judge it against the goldens, gate."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from parity.atomic_file import write_atomically
from parity.console import report, show
from parity.deviations import load_deviations
from parity.errors import UsageError
from parity.family_table import Judged, belongs, family_table, replace_block
from parity.gate import check, exit_code
from parity.github import annotations
from parity.golden import GOLDENS, Golden, golden_path
from parity.golden_folder import golden_version
from parity.job_summary import append, job_summary
from parity.junit import junit_xml
from parity.matrix import placed_cases
from parity.opt_in import choose
from parity.platform_key import platform_key
from parity.progress import LongWork
from parity.reporting import results
from parity.said_once import SaidOnce
from parity.snapshot import Snapshot
from parity.stored_traces import StoredTraces
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
    parser.add_argument(
        "--github", action="store_true", help="print annotations for a GitHub workflow, and add to its job's summary"
    )
    parser.add_argument(
        "--from", dest="traces_of", type=Path, metavar="DIR", help="judge the traces that another engine left in DIR"
    )
    parser.add_argument("--jobs", type=_jobs, metavar="N", help="worker processes (default: one a processor)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="keep every trace here, for assay diff")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="leave check.json here, for assay report (default: reports)"
    )
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
    stored = None if args.traces_of is None else _stored(args.traces_of)
    places = {case.name: place for case, place in placed}
    errors = Console(stderr=True)
    with (
        LongWork("check", unit="cases", total=len(cases), console=errors) as work,
        TemporaryDirectory(prefix="assay-check-") as said,
    ):
        verdicts = check(
            cases,
            stored or EngineRunners(Path(said)),
            find_snapshot=find_snapshot,
            every_name=frozenset(case.name for case, _ in placed),
            pattern=args.pattern,
            deviations=load_deviations(),
            jobs=args.jobs or os.cpu_count() or 1,
            traces=args.traces,
            on_verdict=lambda _, __, verdict: _tell(work, verdict),
        )
    if args.json:
        print(json.dumps({"counts": counts(verdicts), "cases": [verdict.to_json() for verdict in verdicts]}))
    else:
        report(Console(), verdicts)
        if used := kernels_used(verdicts):
            show(Console(), "kernels: " + ", ".join(f"{n} {level}" for level, n in used.items()))
    if chosen.line:
        show(errors if args.json else Console(), chosen.line)
    if args.github:
        for line in annotations(verdicts, places):
            print(line, file=sys.stderr if args.json else sys.stdout)
        if file := os.environ.get("GITHUB_STEP_SUMMARY"):
            append(Path(file), job_summary(verdicts, left_out=chosen.line))
    found = results.check_result(verdicts, pattern=args.pattern, left_out=chosen.line, places=places)
    results.save_check(args.results or results.RESULTS, found)
    if args.junit is not None:
        write_atomically(args.junit, junit_xml(verdicts, places))
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


@dataclass(frozen=True, slots=True)
class EngineRunners:
    """Makes the reference engine; called in each worker process, so that none but they load mlx.

    Attributes:
        said: Folder of the run, for messages that all workers share.
    """

    said: Path

    def __call__(self) -> Runner:
        """A runner on the kernels that `ASSAY_KERNELS` asks for."""
        from parity.engine_runner import EngineRunner, chosen_kernels  # noqa: PLC0415

        return EngineRunner(kernels=chosen_kernels(SaidOnce(self.said)))


def kernels_used(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts came from which level of kernels: `plain`, `plain (a reason)`, `linear`, ..."""
    judged = (verdict.judged for verdict in verdicts)
    return dict(Counter(p.switches["ASSAY_KERNELS"] for p in judged if p is not None and "ASSAY_KERNELS" in p.switches))


def _stored(folder: Path) -> StoredTraces:
    """The traces of a folder, refused at once where they do not say what they rest on.

    Raises:
        UsageError: They do not.
    """
    stored = StoredTraces(folder=folder.absolute())
    stored.provenance()
    return stored


def find_snapshot(name: str) -> Snapshot:
    """The snapshot of this name, fetched or generated where it is not there yet."""
    from parity.models.fetch import ensure_snapshot  # noqa: PLC0415 - brings converters that few commands need

    return ensure_snapshot(name)


def _tell(work: LongWork, verdict: Verdict) -> None:
    work.tell(verdict.status.value, verdict.name, notable=verdict.status is not Status.IDENTICAL)


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
