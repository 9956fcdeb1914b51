"""The table of a sweep: JSON for programs, Markdown for people.

Guarantees: every row asked stands in the JSON; the Markdown shows each as one sign and lists what is known and
what is new, a known difference by its first rows.
Nothing in either depends on the machine's clock, name or folders.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from parity.sweeping.findings import BEYOND_ROUNDING, Finding, Sorted
from parity.sweeping.plan import PACKED, PLAIN, WEIGHTS, functions
from parity.sweeping.row import FUNCTIONS, OPENS, Row

SIGNS: Final[Mapping[str, str]] = {"equal": "=", "rounding": "~", "logic": "X", "raises": "!", "refused": "-"}
SHOWN: Final = 8  # rows of a known difference
LEGEND: Final = (
    "`=` equal bits; `~` differs by no more than the order of sums explains (1e-4 of the logits' standard deviation in f32, "
    "0.1 in bf16); `X` differs by more; `!` raises; `-` refused; empty: not asked."
)


def to_json(rows: Sequence[Row], found: Sorted) -> dict[str, Any]:
    """Counts by verdict, every row, and what was held against the known differences."""
    verdicts = Counter(row.outcome.verdict for row in rows)
    return {
        "equal": verdicts["equal"],
        "different": verdicts["different"],
        "refused": verdicts["refused"],
        "rows": [row.to_json() for row in rows],
        "known": [{"row": f"{row.subject}: {row.name}", "what": finding.what} for finding, row in found.known],
        "new": [f"{row.subject}: {row.name}" for row in found.new],
        "gone": [finding.what for finding in found.gone],
    }


def to_markdown(rows: Sequence[Row], found: Sorted, *, command: str) -> str:
    """The page.

    Args:
        rows: Of all subjects.
        found: The same rows against the known differences.
        command: What wrote the page.
    """
    lines = ["# Invariances", "", f"Written by `{command}`. Each cell is one equality asked of one model.", "", LEGEND]
    for subject in dict.fromkeys(row.subject for row in rows):
        own = [row for row in rows if row.subject == subject]
        lines += ["", f"## {subject}", "", _tally(own)]
        for dtype, kv in dict.fromkeys((row.dtype, row.kv) for row in own):
            lines += ["", f"### {dtype}, {kv}", "", *_grid([r for r in own if (r.dtype, r.kv) == (dtype, kv)])]
        lines += _known(subject, found)
    if found.new:
        lines += ["", "## New", "", *(f"- {row.subject}: {_told(row)}" for row in found.new)]
    if pairs := flips(rows):
        lines += ["", "## What a newer version mended", "", *pairs]
    return "\n".join(lines) + "\n"


def flips(rows: Iterable[Row]) -> list[str]:
    """For two versions of one oracle: models and equalities that differ beyond rounding in the older one only."""
    by_subject: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_subject.setdefault(row.subject, {})[row.name] = row
    lines = []
    for older, newer in itertools.permutations(by_subject, 2):
        if older.partition(" ")[0] == newer.partition(" ")[0] and _version(older) < _version(newer):
            lines += _flipped(by_subject[older], by_subject[newer], older, newer)
    return lines


def _version(subject: str) -> tuple[int, ...]:
    return tuple(int(part) for part in subject.partition(" ")[2].split(".") if part.isdecimal())


def _flipped(old: Mapping[str, Row], new: Mapping[str, Row], older: str, newer: str) -> list[str]:
    """One line a way of failing: the same message, or the same equality with another value."""
    groups: dict[str, list[Row]] = {}
    for name, row in old.items():
        other = new.get(name)
        if other is not None and row.outcome.kind in BEYOND_ROUNDING and other.outcome.kind in ("equal", "rounding"):
            groups.setdefault(row.outcome.detail or f"another value: {row.invariance}", []).append(row)
    head = [f"{older} against {newer}:", ""] if groups else []
    return head + [f"- {how}: {', '.join(row.name for row in group)}" for how, group in groups.items()]


def _tally(rows: Sequence[Row]) -> str:
    kinds = Counter(row.outcome.kind for row in rows)
    return ", ".join(f"{kinds[kind]} {kind}" for kind in SIGNS if kinds[kind])


def _grid(rows: Sequence[Row]) -> list[str]:
    order = (OPENS, *PLAIN, *PACKED, *WEIGHTS, *functions())
    asked = {row.invariance for row in rows}
    columns = [name for name in order if name in asked]
    lines = ["| model | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    models = dict.fromkeys(row.model for row in rows if row.model != FUNCTIONS)
    lines += [_line(model, [row for row in rows if row.model == model], columns) for model in models]
    if own := [row for row in rows if row.model == FUNCTIONS]:
        lines.append(_line(FUNCTIONS, own, columns))
    return lines


def _line(model: str, rows: Sequence[Row], columns: Sequence[str]) -> str:
    signs = {row.invariance: SIGNS[row.outcome.kind] for row in rows}
    return f"| {model} | " + " | ".join(signs.get(column, "") for column in columns) + " |"


def _known(subject: str, found: Sorted) -> list[str]:
    """The known differences of one subject, each with the rows that show it."""
    groups: dict[int, tuple[Finding, list[Row]]] = {}
    for finding, row in found.known:
        if row.subject == subject:
            groups.setdefault(id(finding), (finding, []))[1].append(row)
    lines = ["", "Known differences:", ""] if groups else []
    for finding, rows in groups.values():
        lines.append(f"- {finding.what} Right: {finding.right}")
        lines += [f"  - {_told(row)}" for row in rows[:SHOWN]]
        lines += [f"  - {len(rows) - SHOWN} more, in the tables above and in the JSON"] if len(rows) > SHOWN else []
    return lines


def _told(row: Row) -> str:
    outcome = row.outcome
    if outcome.detail:
        return f"`{row.name}`: {outcome.detail}"
    size = "" if outcome.size is None else f", {outcome.size:.2g} standard deviations"
    return f"`{row.name}`: first at {outcome.where}{size}"
