import pytest

from parity.github import annotations
from parity.matrix import Place
from parity.verdict import Status, Verdict

PLACES = {"toy/x": Place(file="toy.toml", line=12)}


def test_an_annotation_stands_at_the_line_of_the_matrix() -> None:
    verdict = Verdict(
        name="toy/x", status=Status.DIFFERENT, what="not identical", facts={"step": "1 of 3"}, next_step="look"
    )

    assert annotations((verdict,), PLACES) == [
        "::error file=parity/cases/toy.toml,line=12,title=DIFFERENT toy/x::not identical%0A  step  1 of 3%0A  next  look"
    ]


def test_a_verdict_without_a_place_is_annotated_without_one() -> None:
    verdict = Verdict(name="gone", status=Status.STALE_GOLDEN, what="belongs to no case")

    assert annotations((verdict,), PLACES) == ["::error title=STALE_GOLDEN gone::belongs to no case"]


def test_nothing_can_break_out_of_its_line_or_property() -> None:
    verdict = Verdict(name="a,b:c%\n::warning::", status=Status.ERROR, what="50%\r\n::set-env name=X::1")

    (line,) = annotations((verdict,), {})

    assert line == "::error title=ERROR a%2Cb%3Ac%25%0A%3A%3Awarning%3A%3A::50%25%0D%0A::set-env name=X::1"
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("status", [Status.IDENTICAL, Status.KNOWN_DEVIATION, Status.MEASURED_OK])
def test_what_passes_is_not_annotated(status: Status) -> None:
    assert annotations((Verdict(name="toy/x", status=status, what=""),), PLACES) == []


def test_more_than_github_shows_of_a_step_are_named_in_the_last_line() -> None:
    many = tuple(Verdict(name=f"toy/{n}", status=Status.ERROR, what="") for n in range(12))

    lines = annotations(many, {})

    assert len(lines) == 10
    assert lines[8] == "::error title=ERROR toy/8::"
    assert lines[9] == "::error title=3 more that do not pass::ERROR toy/9%0AERROR toy/10%0AERROR toy/11"
    assert len(annotations(many[:10], {})) == 10
    assert annotations(many[:10], {})[9] == "::error title=ERROR toy/9::"
