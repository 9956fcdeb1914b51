"""`assay sweep [PATTERN ...]`: ask equalities that need no golden, of the engine and of oracles.

Exit code 0: every difference beyond rounding is a known one, and every known one that was asked is still there; 1: not.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from oracles.environment import ensure_environment
from oracles.mlx_lm.sweep import rows as asked_rows
from oracles.registry import REPOSITORY, find_oracle
from oracles.sweeping import sweep_oracle
from parity.atomic_file import write_atomically
from parity.errors import UsageError
from parity.models.tiny_catalogue import config_names, read
from parity.sweeping.findings import BEYOND_ROUNDING, load_findings, sort_findings
from parity.sweeping.report import flips, to_json, to_markdown
from parity.sweeping.row import Row

ENGINE: Final = "engine"
ENTRIES: Final = {"mlx-lm": "oracles.mlx_lm.sweep", "mlx-optiq": "oracles.mlx_optiq.sweep"}
CONFIGS: Final = REPOSITORY / "oracles" / "mlx_lm" / "sweep_configs"
FUNCTIONS_OF: Final = "llama"  # the config whose oracle's functions are asked
DTYPES: Final = ("f32", "bf16")
KVS: Final = ("fp", "kv8-g32")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the verb."""
    parser = subparsers.add_parser(
        "sweep",
        help="invariances: pieces, batches, padding, forks, files, order",
        description="Ask equalities that need no golden. Rows are named MODEL/DTYPE/KV/INVARIANCE. "
        "Example: assay sweep 'gemma*/f32/fp/batch-*' --oracle mlx-lm",
    )
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="shell globs over row names (default: every row)"
    )
    parser.add_argument(
        "--oracle",
        action="append",
        default=[],
        metavar="NAME",
        help="ask this oracle instead of the engine; may be repeated, and `engine` names the engine",
    )
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="only this dtype (default: both)")
    parser.add_argument(
        "--join",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="earlier results whose rows are judged and shown with these; may be repeated",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument(
        "--results", type=Path, default=Path("reports/sweep.json"), metavar="FILE", help="JSON for assay report"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, tell, decide."""
    for name in args.oracle:
        if name != ENGINE and find_oracle(name).name.partition("==")[0] not in ENTRIES:
            raise UsageError(
                f"oracle {name} cannot be swept", known=", ".join((ENGINE, *ENTRIES)), next_step="assay oracles list"
            )
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    found = [row for file in args.join for row in _earlier(file)]
    for subject in args.oracle or [ENGINE]:
        for row in _asked(subject, args, progress):
            found.append(row)
            if row.outcome.kind in BEYOND_ROUNDING:
                progress.print(f"{row.subject}: {row.name}: {row.outcome.detail or row.outcome.where}", markup=False)
    if not found:
        raise UsageError(
            f"no row matches {' '.join(args.patterns)!r}",
            names="MODEL/DTYPE/KV/INVARIANCE, such as llama/f32/fp/in-pieces",
            next_step="assay sweep --help",
        )
    held = sort_findings(found, load_findings(), whole=not args.patterns and not args.dtype and not args.join)
    answer = to_json(found, held)
    write_atomically(args.results, json.dumps(answer).encode() + b"\n")
    if args.markdown is not None:
        write_atomically(args.markdown, to_markdown(found, held, command=_command(args)).encode())
    if args.json:
        print(json.dumps(answer))
    else:
        _tell(found, answer)
    return 1 if held.new or held.gone else 0


def _earlier(file: Path) -> list[Row]:
    """Rows that an earlier sweep left.

    Raises:
        UsageError: The file is not such a result.
    """
    try:
        return [Row.from_json(raw) for raw in json.loads(file.read_bytes())["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "earlier results of a sweep cannot be read",
            file=file,
            reason=error,
            next_step="name a file that assay sweep --results left",
        ) from error


def _asked(subject: str, args: argparse.Namespace, progress: Console) -> Iterator[Row]:
    dtypes, models = tuple(args.dtype or DTYPES), {name: read(name) for name in config_names()}
    if subject == ENGINE:
        from parity.sweeping.engine_subject import EngineSubject  # noqa: PLC0415 - loads mlx

        named = {name: {"config": name} for name in models}
        request: dict[str, Any] = {"models": named, "functions": named[FUNCTIONS_OF], "dtypes": dtypes, "kvs": KVS}
        request |= {"patterns": args.patterns, "answered": []}
        for row in asked_rows(request, EngineSubject.opened, lambda _name: None):
            yield Row.from_json(row.to_json(), subject=ENGINE)
        return
    oracle = find_oracle(subject)
    for file in sorted(CONFIGS.glob("*.json")):
        models[file.stem] = json.loads(file.read_text(encoding="utf-8"))
    python = ensure_environment(oracle, on_line=progress.print)
    name = oracle.name.partition("==")[0]
    yield from sweep_oracle(
        ENTRIES[name],
        python,
        subject=f"{name} {oracle.version}",
        models=models,
        functions=read(FUNCTIONS_OF),
        dtypes=dtypes,
        kvs=KVS,
        patterns=args.patterns,
    )


def _tell(rows: list[Row], answer: dict[str, Any]) -> None:
    for line in flips(rows):
        print(line)
    for name in answer["new"]:
        print(f"NEW   {name}")
    for what in answer["gone"]:
        print(f"GONE  {what}")
    print(f"{len(rows)} asked: {answer['equal']} equal, {answer['different']} different, {answer['refused']} refused")
    print(f"{len(answer['known'])} known differences, {len(answer['new'])} new, {len(answer['gone'])} gone")


def _command(args: argparse.Namespace) -> str:
    words = ["assay sweep", *(f"'{p}'" for p in args.patterns), *(f"--oracle {name}" for name in args.oracle)]
    words += [f"--dtype {dtype}" for dtype in args.dtype or ()]
    return " ".join([*words, *(f"--join {file}" for file in args.join)])
