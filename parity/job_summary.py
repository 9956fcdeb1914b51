"""Verdicts as the summary of a GitHub job: Markdown, a table and the messages of what does not pass.

Guarantees: as many messages as fit the limit of a summary, the others counted; a message cannot leave its block, whatever it
says; a summary is appended and never replaces what other steps wrote.
"""

from pathlib import Path
from typing import Final

from parity.console import closing, summary
from parity.verdict import Verdict

MESSAGES: Final = 50
BYTES: Final = 900_000  # GitHub takes 1 MiB a step
COLUMNS: Final = ("model", "snapshot", "dtype", "KV modes", "identical", "other")


def job_summary(verdicts: tuple[Verdict, ...], *, left_out: str | None = None) -> str:
    """The whole summary."""
    bad = [verdict for verdict in verdicts if not verdict.passes]
    sign = "✓" if verdicts and not bad else "✗"
    lines = [f"## {sign} assay check: {closing(verdicts)}", ""]
    shown = 0
    for verdict in bad[:MESSAGES]:
        block = _block(verdict)
        if len("\n".join(lines + block).encode()) > BYTES // 2:
            break
        lines += block
        shown += 1
    if shown < len(bad):
        lines += [f"and {len(bad) - shown} more that do not pass: they are in the log and in the JUnit report", ""]
    if left_out:
        lines += [_cell(left_out), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in summary(verdicts)]
    return "\n".join(lines) + "\n"


def append(file: Path, text: str) -> None:
    """Add a summary to those of the steps before."""
    with file.open("a", encoding="utf-8") as out:
        out.write(text)


def _block(verdict: Verdict) -> list[str]:
    message = verdict.message()
    fence = "`" * max(3, 1 + max((len(run) for run in _ticks(message)), default=0))
    return [f"**{verdict.status.value}** {_cell(verdict.name)}", "", fence, *message.splitlines(), fence, ""]


def _ticks(text: str) -> list[str]:
    """Runs of backticks: a fence must be longer than any of them."""
    return [run for run in "".join(c if c == "`" else " " for c in text).split() if run]


def _cell(text: str) -> str:
    """Text for one line of Markdown: what would end a cell or start markup is escaped."""
    flat = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("`", "\\`")
