"""Errors that a user can meet: each says what happened, the facts, and the next command.

Guarantees: every error raised on purpose by `parity`, `oracles` and `bench` is an `AssayError`; the command line prints it
and exits 2. Anything else that escapes is a fault of ours and shows its stack trace.
"""

from typing import ClassVar


class AssayError(Exception):
    """Base of the errors that are the caller's to mend.

    Args:
        what: One line that says what happened.
        next_step: The command or action that mends it.
        facts: Aligned lines between the two; underscores in names become spaces.
    """

    kind: ClassVar[str] = "error"

    def __init__(self, what: str, /, *, next_step: str, **facts: object) -> None:
        self.what = what
        self.next_step = next_step
        self.facts = facts
        super().__init__(lay_out(what, {**facts, "next": next_step}))


class UsageError(AssayError):
    """The command line names something that does not exist or does not fit."""

    kind = "usage"


class CaseError(AssayError):
    """A case table is malformed, or asks for what cannot be."""

    kind = "case"


class SnapshotError(AssayError):
    """A snapshot is missing, incomplete, or not the one that was promised."""

    kind = "snapshot"


class GoldenError(AssayError):
    """A golden is missing, rotten, or must not be overwritten."""

    kind = "golden"


class OracleError(AssayError):
    """An oracle's environment or process failed."""

    kind = "oracle"


def lay_out(what: str, facts: dict[str, object]) -> str:
    """Lay out a message: one line, then one aligned line per fact.

    Args:
        what: The first line.
        facts: Name to value; a value of several lines is indented under its first.
    """
    names = {name: name.replace("_", " ") for name in facts}
    width = max(map(len, names.values()), default=0)
    lines = [what]
    for name, value in facts.items():
        first, *rest = str(value).splitlines() or [""]
        lines.append(f"  {names[name]:<{width}}  {first}")
        lines += [f"  {'':<{width}}  {line}" for line in rest]
    return "\n".join(lines)
