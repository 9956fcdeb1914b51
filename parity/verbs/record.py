"""`assay record [PATTERN]`: run oracles, write goldens. The only way in which a golden comes to be."""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console

from oracles.environment import ensure_environment
from oracles.journal import Journal
from oracles.recording import Recorded, Recording, Workshop, record
from oracles.registry import find_oracle
from oracles.unused import remove_unused
from parity.errors import UsageError
from parity.golden import GOLDENS
from parity.golden_folder import golden_version
from parity.platform_key import platform_key
from parity.progress import LongWork

EXIT_NOT_RECORDED = 2


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser("record", help="run the oracles and write goldens")
    parser.add_argument("pattern", nargs="?", help="shell glob over case names; all cases without it")
    parser.add_argument("--reason", help="why bits may change; written into the history of those that do")
    parser.add_argument("--into", type=Path, metavar="DIR", help="write to DIR and leave the committed goldens alone")
    parser.add_argument("--prune", action="store_true", help="remove goldens that no case claims")
    parser.add_argument(
        "--if-none",
        action="store_true",
        help="do nothing where this platform has goldens and no recording was interrupted",
    )
    parser.add_argument("--fresh", action="store_true", help="compute again what an interrupted recording had finished")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="oracle processes at a time")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record; 0 when every chosen case has its golden, 2 when one was refused or failed.

    Raises:
        UsageError: The pattern matches nothing, or options contradict each other.
    """
    from parity.matrix import load_cases  # noqa: PLC0415 - reading all case tables is this verb's work, not import's
    from parity.models.fetch import ensure_snapshot  # noqa: PLC0415 - as above
    from parity.opt_in import choose  # noqa: PLC0415 - as above

    _check(args)
    cases = load_cases()
    choice = choose(cases, args.pattern)
    chosen = choice.cases
    if choice.line:
        print(choice.line, file=sys.stderr)
    if args.if_none:
        there = any(golden_version(oracle, GOLDENS, platform_key()) for oracle in {case.oracle for case in chosen})
        interrupted = Journal.of(GOLDENS).folder.is_dir()
        if there and not interrupted:
            return 0
        state = "an interrupted recording has not ended" if interrupted else "there are none yet"
        print(f"goldens for {platform_key()}: {state}; building the oracle and recording them", file=sys.stderr)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with LongWork("record", unit="cases", total=len(chosen), console=console) as work:

        def on_result(result: Recorded) -> None:
            work.tell(result.status, result.case, notable=True)
            if console.is_terminal and result.error:
                console.print(f"{result.case} {result.status}", markup=False)

        def on_line(line: str) -> None:
            console.print(line, markup=False)

        recording = record(
            chosen,
            root=GOLDENS,
            workshop=Workshop(
                oracle_of=find_oracle,
                snapshot_of=ensure_snapshot,
                environment_of=lambda oracle: ensure_environment(oracle, on_line=on_line),
            ),
            all_cases=cases,
            into=args.into,
            jobs=args.jobs,
            reason=args.reason,
            fresh=args.fresh,
            on_result=on_result,
            on_line=on_line,
        )
    pruned = args.prune and recording.complete
    if pruned:
        remove_unused(recording.unused, GOLDENS)
    _report(recording, pruned=pruned, as_json=args.json)
    return 0 if recording.complete else EXIT_NOT_RECORDED


def _check(args: argparse.Namespace) -> None:
    if args.jobs < 1:
        raise UsageError("--jobs needs at least one process", given=args.jobs, next_step="assay record --jobs 1")
    if args.reason is not None and not args.reason.strip():
        raise UsageError("--reason is empty", next_step="say why the bits may change, in words for the history")
    if args.prune and args.into:
        raise UsageError(
            "--prune and --into contradict each other",
            prune="removes committed goldens",
            into="leaves them alone",
            next_step="give one of the two",
        )


def _report(recording: Recording, *, pruned: bool, as_json: bool) -> None:
    counts = Counter(result.status for result in recording.results)
    if as_json:
        print(json.dumps(_as_json(recording, pruned=pruned)))
        return
    for result in recording.results:
        if result.error is not None:
            print(f"{result.error}\n", file=sys.stderr)
    print(", ".join(f"{count} {status}" for status, count in counts.items()) or "no cases")
    for file in recording.unused:
        print(f"unused {'removed' if pruned else '(--prune removes it)'}: {file.relative_to(GOLDENS)}")


def _as_json(recording: Recording, *, pruned: bool) -> dict[str, object]:
    return {
        "counts": dict(Counter(result.status for result in recording.results)),
        "cases": [
            {
                "case": result.case,
                "status": result.status,
                "resumed": result.resumed,
                "error": None
                if result.error is None
                else {"kind": result.error.kind, "message": str(result.error), "next": result.error.next_step},
            }
            for result in recording.results
        ],
        "unused": [file.relative_to(GOLDENS).as_posix() for file in recording.unused],
        "pruned": pruned,
    }
