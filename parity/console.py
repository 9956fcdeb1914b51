"""Verdicts for people: counts by family and dtype, then every case that does not pass with its message.

Guarantees: colour and boxes on a terminal only, and no colour under NO_COLOR; plain aligned lines elsewhere; long lines are
never cut or wrapped. Nothing from a message is read as markup.
"""

from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.verdict import Status, Verdict, counts

_COLUMNS: Final = ("model", "snapshot", "dtype", "KV modes", "identical", "other")


def report(console: Console, verdicts: tuple[Verdict, ...]) -> None:
    """Print the table, the messages of what does not pass, and one closing line."""
    rows = summary(verdicts)
    if console.is_terminal:
        console.print(_table(rows))
    else:
        for line in aligned([_COLUMNS, *rows]):
            show(console, line)
    for verdict in verdicts:
        if verdict.status is not Status.IDENTICAL:
            show(console, "")
            show(console, f"{verdict.status.value}  {verdict.message()}", style="yellow" if verdict.passes else "red")
    show(console, "")
    show(console, closing(verdicts), style="green" if verdicts and all(v.passes for v in verdicts) else "red")


def summary(verdicts: Iterable[Verdict]) -> list[tuple[str, ...]]:
    """Rows of `model, snapshot, dtype, KV modes, identical, other`, tiny snapshots of one family and dtype in one row."""
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        case = verdict.case
        if case is None:
            key = ("-", "no case", "-")
        else:
            snapshot = "tiny" if case.snapshot.endswith("-tiny") else case.snapshot
            key = (verdict.model_type or "-", snapshot, case.dtype)
        groups.setdefault(key, []).append(verdict)
    return [
        (*key, _modes(members), str(sum(v.status is Status.IDENTICAL for v in members)), _others(members))
        for key, members in groups.items()
    ]


def closing(verdicts: tuple[Verdict, ...]) -> str:
    """`130 cases: 128 IDENTICAL, 2 DIFFERENT`."""
    told = ", ".join(f"{n} {status}" for status, n in counts(verdicts).items())
    return f"{len(verdicts)} {'case' if len(verdicts) == 1 else 'cases'}: {told or 'nothing was judged'}"


def aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows as lines of aligned columns, two spaces apart."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def show(console: Console, text: str, *, style: str = "") -> None:
    """Print text as it stands: no markup, no highlighting, no wrapping."""
    console.print(Text(text, style=style), soft_wrap=True, highlight=False)


def _modes(members: list[Verdict]) -> str:
    """The KV modes by name, the fourth and further ones counted."""
    modes = list(dict.fromkeys(verdict.case.kv.name for verdict in members if verdict.case is not None))
    more = [f"{len(modes) - 3} more"] if len(modes) > 3 else []
    return ", ".join(modes[:3] + more) or "-"


def _others(members: list[Verdict]) -> str:
    return ", ".join(f"{n} {s}" for s, n in counts(tuple(members)).items() if s != Status.IDENTICAL.value) or "-"


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row), style="" if row[-1] == "-" else "red")
    return table
