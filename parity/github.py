"""Verdicts as annotations of a GitHub workflow: one line each, at the line of the matrix table that makes the case.

Guarantees: a line each for verdicts that do not pass, and none for others; where there are more than GitHub shows of one step,
the last line names the rest, so that none is dropped in silence; text is escaped as workflow commands want it, so
that no message can end a line, forge a property or start a command of its own.
"""

from collections.abc import Mapping
from typing import Final

from parity.matrix import Place
from parity.verdict import Verdict

SHOWN: Final = 10  # errors of one step that GitHub shows


def annotations(verdicts: tuple[Verdict, ...], places: Mapping[str, Place]) -> list[str]:
    """One `::error ...::...` line for each verdict that does not pass, at most `SHOWN`, the last of them for all that are left.

    Args:
        verdicts: In any order.
        places: Case name to where it is written; a verdict without one is annotated without file and line.
    """
    bad = [verdict for verdict in verdicts if not verdict.passes]
    if len(bad) <= SHOWN:
        return [_annotation(verdict, places.get(verdict.name)) for verdict in bad]
    lines = [_annotation(verdict, places.get(verdict.name)) for verdict in bad[: SHOWN - 1]]
    rest = bad[SHOWN - 1 :]
    told = "\n".join(f"{verdict.status.value} {verdict.name}" for verdict in rest)
    return [*lines, f"::error title={_property(f'{len(rest)} more that do not pass')}::{_data(told)}"]


def _annotation(verdict: Verdict, place: Place | None) -> str:
    where = "" if place is None else f"file={_property(f'parity/cases/{place.file}')},line={place.line},"
    title = _property(f"{verdict.status.value} {verdict.name}")
    return f"::error {where}title={title}::{_data(verdict.message())}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
