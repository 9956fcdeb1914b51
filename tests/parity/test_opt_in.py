"""Cases of snapshots with terms of use run only if they are named, and it is said when they are not."""

from collections.abc import Callable

import pytest

from parity.case import Case
from parity.errors import UsageError
from parity.matrix import load_cases
from parity.opt_in import choose, opt_in_snapshots

GEMMA = "gemma3-270m"


@pytest.fixture
def cases(make_case: Callable[..., Case]) -> tuple[Case, ...]:
    names = ("toy/f32/a", f"{GEMMA}/f32/a", f"{GEMMA}/f32/b", "gemma3_text-tiny/f32/a")
    return tuple(make_case(name, snapshot=name.split("/", 1)[0]) for name in names)


def test_the_snapshots_with_terms_are_opt_in() -> None:
    assert opt_in_snapshots() == {GEMMA}
    assert any(case.snapshot == GEMMA for case in load_cases())


@pytest.mark.parametrize("pattern", [None, "*", "*/a", "g*/f32/a", f"{GEMMA[:-1]}?/*", "[tg]*"])
def test_no_glob_that_happens_to_match_chooses_them(cases: tuple[Case, ...], pattern: str | None) -> None:
    matching_others = pattern in {None, "*", "*/a", "g*/f32/a", "[tg]*"}
    if not matching_others:
        with pytest.raises(UsageError, match="only opt-in cases match"):
            choose(cases, pattern)
        return
    chosen = choose(cases, pattern)
    assert GEMMA not in {case.snapshot for case in chosen.cases}
    assert {case.snapshot for case in chosen.left_out} == {GEMMA}
    count = "2 cases" if pattern in {None, "*", "[tg]*"} else "1 case"
    assert chosen.line == f"left out: {count} of {GEMMA} (opt-in: '{GEMMA}/*' chooses them)"


@pytest.mark.parametrize(("pattern", "count"), [(f"{GEMMA}/*", 2), (f"{GEMMA}/f32/a", 1)])
def test_the_snapshots_own_name_chooses_them(cases: tuple[Case, ...], pattern: str, count: int) -> None:
    chosen = choose(cases, pattern)
    assert [case.snapshot for case in chosen.cases] == [GEMMA] * count
    assert chosen.left_out == ()
    assert chosen.line is None


def test_a_pattern_that_matches_nothing_else_is_told_what_to_write(cases: tuple[Case, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        choose(cases, "*270m/*")
    assert str(caught.value) == (
        "only opt-in cases match '*270m/*'\n"
        f"  cases  {GEMMA}/f32/a\n"
        f"         {GEMMA}/f32/b\n"
        f"  next   name the snapshot: '{GEMMA}/*'"
    )


def test_without_opt_in_cases_nothing_is_said(cases: tuple[Case, ...]) -> None:
    chosen = choose(cases, "toy/*")
    assert (len(chosen.cases), chosen.line) == (1, None)
