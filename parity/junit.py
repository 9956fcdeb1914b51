"""Verdicts as JUnit XML, which CI servers read.

Guarantees: one test case a verdict, suites by snapshot, in order, with the file and line that make the case; no time stamp
and no durations, so that equal verdicts give equal bytes; a verdict that does not pass is a failure, one that could
not be reached an error, with the whole message inside. Characters that XML cannot carry are replaced, never dropped.
"""

import re
from collections.abc import Mapping
from typing import Final
from xml.etree import ElementTree as ET

from parity.matrix import Place
from parity.verdict import Status, Verdict

# Everything but tab, newline, carriage return and the three ranges of XML 1.0's Char.
_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_UNREACHED: Final = frozenset({Status.ERROR, Status.MISSING_GOLDEN, Status.STALE_GOLDEN})


def junit_xml(verdicts: tuple[Verdict, ...], places: Mapping[str, Place] | None = None) -> bytes:
    """The whole report, UTF-8.

    Args:
        verdicts: In any order.
        places: Case name to where it is written; a verdict without one has no file and line.
    """
    known = places or {}
    root = ET.Element("testsuites", {"name": "assay check", **_totals(verdicts)})
    suites: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        suites.setdefault(verdict.name.partition("/")[0], []).append(verdict)
    for name, members in suites.items():
        suite = ET.SubElement(root, "testsuite", {"name": _clean(name), **_totals(tuple(members))})
        for verdict in members:
            folder, _, leaf = verdict.name.rpartition("/")
            place = known.get(verdict.name)
            where = {} if place is None else {"file": f"parity/cases/{place.file}", "line": str(place.line)}
            names = {"classname": _clean(folder.replace("/", ".")), "name": _clean(leaf)}
            case = ET.SubElement(suite, "testcase", {**names, **where})
            _fill(case, verdict)
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _fill(case: ET.Element, verdict: Verdict) -> None:
    if not verdict.passes:
        tag = "error" if verdict.status in _UNREACHED else "failure"
        entry = ET.SubElement(case, tag, type=verdict.status.value, message=_clean(verdict.what))
        entry.text = _clean(verdict.message())
    elif verdict.status is not Status.IDENTICAL:
        ET.SubElement(case, "system-out").text = _clean(f"{verdict.status.value}\n{verdict.message()}")


def _totals(verdicts: tuple[Verdict, ...]) -> dict[str, str]:
    bad = [verdict for verdict in verdicts if not verdict.passes]
    errors = sum(verdict.status in _UNREACHED for verdict in bad)
    return {"tests": str(len(verdicts)), "failures": str(len(bad) - errors), "errors": str(errors), "skipped": "0"}


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
