from xml.etree import ElementTree as ET

import pytest

from parity.junit import junit_xml
from parity.matrix import Place
from parity.verdict import Status, Verdict


def verdict(status: Status, name: str = "toy/f32/fp/greedy/p3", **fields: object) -> Verdict:
    return Verdict(name=name, status=status, what="it happened", facts=fields, next_step="look")


def test_suites_are_snapshots_and_cases_keep_their_order() -> None:
    root = ET.fromstring(  # noqa: S314 - our own output
        junit_xml(
            (
                verdict(Status.IDENTICAL, "b/f32/x"),
                verdict(Status.DIFFERENT, "a/f32/x"),
                verdict(Status.ERROR, "b/f32/y"),
            )
        )
    )

    assert [suite.get("name") for suite in root] == ["b", "a"]
    assert [(c.get("classname"), c.get("name")) for c in root.iter("testcase")] == [
        ("b.f32", "x"),
        ("b.f32", "y"),
        ("a.f32", "x"),
    ]
    assert (root.get("tests"), root.get("failures"), root.get("errors"), root.get("skipped")) == ("3", "1", "1", "0")
    assert (root[0].get("tests"), root[0].get("failures"), root[0].get("errors")) == ("2", "0", "1")


@pytest.mark.parametrize(
    ("status", "tag"),
    [
        (Status.IDENTICAL, None),
        (Status.KNOWN_DEVIATION, "system-out"),
        (Status.MEASURED_OK, "system-out"),
        (Status.DIFFERENT, "failure"),
        (Status.INCOMPARABLE, "failure"),
        (Status.FIXED, "failure"),
        (Status.MEASURED_BAD, "failure"),
        (Status.MISSING_GOLDEN, "error"),
        (Status.STALE_GOLDEN, "error"),
        (Status.ERROR, "error"),
    ],
)
def test_each_status_has_its_element(status: Status, tag: str | None) -> None:
    (case,) = ET.fromstring(junit_xml((verdict(status),))).iter("testcase")  # noqa: S314 - our own output

    assert [child.tag for child in case] == ([] if tag is None else [tag])
    if tag in ("failure", "error"):
        assert (case[0].get("type"), case[0].get("message")) == (status.value, "it happened")
        assert case[0].text == "it happened\n  next  look"


def test_text_that_xml_cannot_carry_is_replaced_and_markup_is_escaped() -> None:
    bad = verdict(Status.ERROR, reason="a\x1b[31m \x00 <b> & \ud800 \ufffe ü")

    text = ET.fromstring(junit_xml((bad,)))[0][0][0].text  # noqa: S314 - our own output

    assert text is not None
    assert "a\ufffd[31m \ufffd <b> & \ufffd \ufffd ü" in text


def test_a_case_carries_the_file_and_line_that_make_it() -> None:
    known = {"toy/f32/x": Place(file="toy.toml", line=7)}
    both = (verdict(Status.DIFFERENT, "toy/f32/x"), verdict(Status.STALE_GOLDEN, "toy/f32/gone"))

    first, second = ET.fromstring(junit_xml(both, known)).iter("testcase")  # noqa: S314 - our own output

    assert (first.get("file"), first.get("line")) == ("parity/cases/toy.toml", "7")
    assert (second.get("file"), second.get("line")) == (None, None)


def test_the_report_is_utf8_with_a_declaration_and_no_time_stamp() -> None:
    report = junit_xml((verdict(Status.IDENTICAL),))

    assert report.startswith(b"<?xml version='1.0' encoding='utf-8'?>\n<testsuites")
    assert b"time" not in report.replace(b"testsuites", b"")
