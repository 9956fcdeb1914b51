"""Verdicts as annotations of a GitHub workflow: one line each, at the line of the matrix table that makes the case.

Guarantees: a line each for verdicts that do not pass, and none for others; text is escaped as workflow commands want it, so
that no message can end a line, forge a property or start a command of its own.
"""

from collections.abc import Mapping

from parity.matrix import Place
from parity.verdict import Verdict


def annotations(verdicts: tuple[Verdict, ...], places: Mapping[str, Place]) -> list[str]:
    """One `::error ...::...` line for each verdict that does not pass.

    Args:
        verdicts: In any order.
        places: Case name to where it is written; a verdict without one is annotated without file and line.
    """
    return [_annotation(verdict, places.get(verdict.name)) for verdict in verdicts if not verdict.passes]


def _annotation(verdict: Verdict, place: Place | None) -> str:
    where = "" if place is None else f"file={_property(f'parity/cases/{place.file}')},line={place.line},"
    title = _property(f"{verdict.status.value} {verdict.name}")
    return f"::error {where}title={title}::{_data(verdict.message())}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
