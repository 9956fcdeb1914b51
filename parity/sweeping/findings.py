"""Differences that a sweep is known to find, each with what is wrong and who is right: `findings.toml`.

Guarantees: strict both ways. A difference beyond rounding that no entry declares is new; an entry that shows in no row of its
subject's whole sweep no longer holds. Either fails the sweep. An entry excuses nothing: it says what is known.
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from parity.errors import CaseError
from parity.sweeping.row import Row, wanted

FINDINGS: Final = Path(__file__).with_name("findings.toml")
KEYS: Final = ("subject", "rows", "what", "right")
BEYOND_ROUNDING: Final = ("logic", "raises")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One known difference.

    Attributes:
        subject: Shell glob over subjects: `mlx-lm 0.32.2`.
        rows: Shell globs over row names: `gemma2/*/fp/batch-*`.
        what: What goes wrong, and where.
        right: What would be right.
    """

    subject: str
    rows: tuple[str, ...]
    what: str
    right: str

    def covers(self, row: Row) -> bool:
        """Whether this entry speaks of that row."""
        return fnmatchcase(row.subject, self.subject) and wanted(self.rows, row.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """What a sweep found, held against what is known.

    Attributes:
        new: Differences beyond rounding that no entry declares.
        known: Those that one does, each with the first entry that does.
        gone: Entries whose rows no longer differ; none where only a part was asked.
    """

    new: tuple[Row, ...]
    known: tuple[tuple[Finding, Row], ...]
    gone: tuple[Finding, ...]


def load_findings(file: Path = FINDINGS) -> tuple[Finding, ...]:
    """The known differences.

    Raises:
        CaseError: The file is malformed.
    """
    raw = tomllib.loads(file.read_text(encoding="utf-8"))
    return tuple(_finding(file, number, table) for number, table in enumerate(raw.get("finding", []), 1))


def sort_findings(rows: Iterable[Row], findings: Sequence[Finding], *, whole: bool = True) -> Sorted:
    """Hold rows against the known differences.

    Args:
        rows: What was asked.
        findings: What is known.
        whole: Everything was asked of the subjects that appear.
    """
    asked = tuple(rows)
    differing = [row for row in asked if row.outcome.kind in BEYOND_ROUNDING]
    new, known, held = list[Row](), list[tuple[Finding, Row]](), set[int]()
    for row in differing:
        entries = [finding for finding in findings if finding.covers(row)]
        held.update(id(finding) for finding in entries)
        if entries:
            known.append((entries[0], row))
        else:
            new.append(row)
    gone = tuple(f for f in findings if whole and id(f) not in held and any(f.covers(row) for row in asked))
    return Sorted(new=tuple(new), known=tuple(known), gone=gone)


def _finding(file: Path, number: int, table: dict[str, Any]) -> Finding:
    rows = table.get("rows")
    texts = [table.get(key) for key in ("subject", "what", "right")]
    if (
        set(table) != set(KEYS)
        or not all(isinstance(text, str) and text for text in texts)
        or not isinstance(rows, list)
        or not rows
        or not all(isinstance(pattern, str) for pattern in rows)
    ):
        raise CaseError(
            "a finding is not described as it must be",
            file=file.name,
            finding=number,
            keys=", ".join(sorted(table)) or "none",
            wanted="subject, rows (a list of globs), what, right",
            next_step=f"correct it in parity/sweeping/{file.name}",
        )
    return Finding(subject=table["subject"], rows=tuple(rows), what=table["what"], right=table["right"])
