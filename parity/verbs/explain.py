"""`assay explain CASE`: run the oracle and the engine side by side, and say where they part and why."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oracles.environment import ensure_environment
from oracles.oracle_runner import OracleRunner
from oracles.registry import REPOSITORY, find_oracle
from parity.case import Case
from parity.errors import UsageError
from parity.explaining.explain import Explanation, explain
from parity.explaining.report import as_json, message
from parity.home import assay_home
from parity.matrix import load_cases, select
from parity.reporting import results
from parity.reproducer import Reproducer, write_reproducer
from parity.snapshot import Snapshot
from parity.trace import Runner

SCRIPTS: Final = {"mlx-lm": REPOSITORY / "oracles" / "mlx_lm" / "reproduce.py"}


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What an explanation is made of; tests put their own in."""

    snapshot: Snapshot
    expected: Runner
    actual: Runner
    recorded_with: str


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the verb."""
    parser = subparsers.add_parser(
        "explain",
        help="localise a difference: step, module path, operation, cause",
        description="Run a case on its oracle and on the engine, every module recorded, and say where they part and why. "
        "Exit code 0: nothing to explain; 1: a difference, explained; 2: the request cannot be met.",
    )
    parser.add_argument("case", metavar="CASE", help="name of a case, or a glob that one name matches")
    parser.add_argument(
        "--reproducer",
        type=Path,
        metavar="DIR",
        help="where the reproducer is written (default: under ASSAY_HOME, by case name)",
    )
    parser.add_argument("--no-reproducer", action="store_true", help="write none")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain one case."""
    cases = load_cases()
    case = _only(select(cases, args.case), args.case)
    sides = sides_of(case)
    explanation = explain(case, sides.snapshot, sides.expected, sides.actual, record=recorded_of(case, cases))
    written = None
    if not explanation.identical and not args.no_reproducer:
        folder = args.reproducer or assay_home() / "reproducers" / case.name
        written = reproducer_of(explanation, sides, folder)
    place = None if written is None else written.folder
    results.save_explained(results.RESULTS, as_json(explanation))
    if args.json:
        print(json.dumps(as_json(explanation, place)))
    else:
        print(message(explanation, place))
    return 0 if explanation.identical else 1


def recorded_of(case: Case, cases: Sequence[Case]) -> tuple[str, ...]:
    """Which modules to compare: those that a case of the same config records, or every one.

    Some modules run twice in a forward, and the oracle refuses to watch them; a case that records says which are left.
    """
    config = case.snapshot.partition("-")[0]
    found = (other.record for other in cases if other.record and other.snapshot.partition("-")[0] == config)
    return case.record or next(found, ("*",))


def sides_of(case: Case) -> Sides:
    """The oracle of a case in its own environment, and the engine here."""
    from parity.engine_runner import EngineRunner  # noqa: PLC0415 - brings mlx
    from parity.models.fetch import ensure_snapshot  # noqa: PLC0415 - brings converters that few commands need

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    oracle = find_oracle(case.oracle)
    pins = ", ".join(f"{name} {version}" for name, version in oracle.pins.items())
    runner = OracleRunner(oracle=oracle, environment_of=lambda o: ensure_environment(o, on_line=say))
    return Sides(snapshot=ensure_snapshot(case.snapshot), expected=runner, actual=EngineRunner(), recorded_with=pins)


def reproducer_of(explanation: Explanation, sides: Sides, folder: Path) -> Reproducer | None:
    """Write the reproducer, where the oracle has a script that runs one."""
    script = SCRIPTS.get(explanation.case.oracle)
    if script is None or explanation.case.kv.max_size is not None:
        return None
    return write_reproducer(
        explanation,
        sides.snapshot,
        sides.expected,
        sides.actual,
        folder=folder,
        script=script,
        recorded_with=sides.recorded_with,
    )


def _only(cases: tuple[Case, ...], pattern: str) -> Case:
    if len(cases) != 1:
        raise UsageError(
            f"{pattern!r} means {len(cases)} cases where one is explained",
            first=", ".join(case.name for case in cases[:3]),
            next_step="name one of them; assay cases lists them",
        )
    return cases[0]
