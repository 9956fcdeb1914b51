from pathlib import Path

import pytest

from parity.errors import CaseError
from parity.sweeping.findings import Finding, load_findings, sort_findings
from parity.sweeping.outcome import Outcome
from parity.sweeping.row import Row

LOGIC = Outcome(verdict="different", where="row 0", size=2.0, max_ulp=9)
ROUNDING = Outcome(verdict="different", where="row 0", size=1e-6, max_ulp=9, bound=1e-4)
EQUAL = Outcome(verdict="equal")


def row(invariance: str, outcome: Outcome, subject: str = "mlx-lm 0.32.2") -> Row:
    return Row(subject=subject, model="llama", dtype="f32", kv="fp", invariance=invariance, outcome=outcome)


def finding(*rows: str, subject: str = "mlx-lm 0.32.2") -> Finding:
    return Finding(subject=subject, rows=rows, what="padding is ignored.", right="each row as alone.")


def test_a_difference_that_nobody_declared_is_new() -> None:
    found = sort_findings([row("in-pieces", LOGIC), row("one-by-one", EQUAL)], [])

    assert [r.invariance for r in found.new] == ["in-pieces"]


def test_rounding_is_no_finding() -> None:
    assert sort_findings([row("in-pieces", ROUNDING)], []).new == ()


def test_a_declared_difference_is_known_and_only_for_its_subject() -> None:
    entry = finding("llama/*/in-pieces")

    assert sort_findings([row("in-pieces", LOGIC)], [entry]).known == ((entry, row("in-pieces", LOGIC)),)
    assert len(sort_findings([row("in-pieces", LOGIC, "engine")], [entry]).new) == 1


def test_a_declared_difference_that_is_asked_and_equal_is_gone() -> None:
    entry = finding("llama/*/in-pieces")

    assert sort_findings([row("in-pieces", EQUAL)], [entry]).gone == (entry,)
    assert sort_findings([row("one-by-one", EQUAL)], [entry]).gone == ()


def test_a_part_of_a_sweep_says_nothing_about_what_is_gone() -> None:
    assert sort_findings([row("in-pieces", EQUAL)], [finding("llama/*/in-pieces")], whole=False).gone == ()


def test_the_committed_findings_can_be_read() -> None:
    assert load_findings()


@pytest.mark.parametrize(
    "text",
    [
        'subject = "a"\nrows = ["b"]\nwhat = "c"',
        'subject = "a"\nrows = []\nwhat = "c"\nright = "d"',
        'subject = "a"\nrows = "b"\nwhat = "c"\nright = "d"',
        'subject = ""\nrows = ["b"]\nwhat = "c"\nright = "d"',
    ],
)
def test_a_malformed_finding_is_refused_by_number(tmp_path: Path, text: str) -> None:
    file = tmp_path / "findings.toml"
    file.write_text(f"[[finding]]\n{text}\n")

    with pytest.raises(CaseError) as caught:
        load_findings(file)

    assert str(caught.value).splitlines()[0] == "a finding is not described as it must be"
    assert "finding" in str(caught.value)
    assert "wanted" in str(caught.value)
