"""The command line `assay`: one entry, one verb a module, one form of error.

Guarantees: exit code 0 = all identical, or as declared; 1 = a difference; 2 = an error of the caller's, told as a message
on standard error, or with `--json` as one object `{"error": {kind, message, next}}` on standard output; 130 = interrupted.
Whatever else escapes is a fault of ours and shows its stack trace. `--json` is understood anywhere on the line.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NoReturn

from engine.errors import EngineError
from parity.errors import AssayError, UsageError
from parity.examples import told
from parity.verbs import bench, cases, check, diff, explain, generate, models, mutate, oracles, record, report, sweep

VERBS: Final = (models, oracles, cases, record, check, explain, diff, sweep, mutate, bench, report, generate)
_CHOICE: Final = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(arguments)
        code: int = args.run(args)
        sys.stdout.flush()
    except (AssayError, EngineError) as error:
        _tell(error, as_json="--json" in arguments)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing half-done is left behind", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left, as `| head` does
        return 141
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose every level knows `--json` and whose errors have the project's form."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse decides what it passes to its parsers
        super().__init__(**{"allow_abbrev": False, **options})
        self.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object on stdout")

    def error(self, message: str) -> NoReturn:
        if match := _CHOICE.search(message):
            known = [name.strip(" '") for name in match["known"].split(",")]
            near = difflib.get_close_matches(match["given"], known, n=3, cutoff=0.4)
            raise UsageError(
                f"{self.prog} has no {match['given']!r}",
                near=", ".join(near) or "none",
                known=", ".join(known),
                next_step=f"{self.prog} --help",
            )
        raise UsageError(message, usage=" ".join(self.format_usage().split()[1:]), next_step=f"{self.prog} --help")


class _Version(argparse.Action):
    """Print the version; looked up only when asked for."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        try:
            number = version("mlx-assay")
        except PackageNotFoundError:
            number = "(a checkout that is not installed)"
        print(f"assay {number}, mlx {version('mlx')}")  # noqa: T201
        raise SystemExit(0)


class _Completion(argparse.Action):
    """Print what a shell needs to complete the command line."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> NoReturn:
        import shtab  # noqa: PLC0415 - one call in a lifetime needs it

        print(shtab.complete(parser, str(shell)))  # noqa: T201
        raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="assay",
        description="Bit-for-bit parity testing of MLX language-model engines against golden oracles.",
        epilog=told(tuple(verb.__name__.rpartition(".")[2] for verb in VERBS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.add_argument(
        "--completion", action=_Completion, choices=("bash", "zsh", "tcsh"), help="print completions for a shell"
    )
    parser.set_defaults(json=False)
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_parser(subparsers)
    return parser


def _tell(error: AssayError | EngineError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": {"kind": error.kind, "message": str(error), "next": error.next_step}}))  # noqa: T201
    else:
        print(error, file=sys.stderr)  # noqa: T201
