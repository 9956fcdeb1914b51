import pytest

from parity.errors import AssayError, CaseError, GoldenError, OracleError, SnapshotError, UsageError, lay_out


def test_a_message_says_what_happened_the_facts_and_the_next_command() -> None:
    error = GoldenError("a golden is gone", looked_at="goldens/x.json", steps=3, next_step="assay record x")

    assert str(error).splitlines() == [
        "a golden is gone",
        "  looked at  goldens/x.json",
        "  steps      3",
        "  next       assay record x",
    ]


def test_lines_after_the_first_are_indented_under_it() -> None:
    assert lay_out("what", {"near": "one\ntwo", "next": "go"}).splitlines() == [
        "what",
        "  near  one",
        "        two",
        "  next  go",
    ]


def test_an_empty_fact_keeps_its_line() -> None:
    assert lay_out("what", {"reason": ""}) == "what\n  reason  "


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("error", AssayError),
        ("usage", UsageError),
        ("case", CaseError),
        ("snapshot", SnapshotError),
        ("golden", GoldenError),
        ("oracle", OracleError),
    ],
)
def test_each_kind_has_its_own_name(kind: str, error: type[AssayError]) -> None:
    assert error.kind == kind
