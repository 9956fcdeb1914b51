from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from parity.case import KV, Case
from parity.console import aligned, closing, report, summary
from parity.verdict import Status, Verdict


@pytest.fixture
def verdicts(make_case: Callable[..., Case]) -> tuple[Verdict, ...]:
    def verdict(status: Status, **fields: Any) -> Verdict:
        case = make_case(**fields)
        return Verdict(name=case.name, case=case, status=status, what="said [bold]so[/bold]", model_type="llama")

    return (
        verdict(Status.IDENTICAL),
        verdict(Status.IDENTICAL),
        verdict(Status.DIFFERENT),
        verdict(Status.IDENTICAL, kv=KV(bits=8)),
        Verdict(name="stray", status=Status.STALE_GOLDEN, what="x" * 300),
    )


def printed(verdicts: tuple[Verdict, ...], **options: Any) -> str:
    out = StringIO()
    report(Console(file=out, width=80, **options), verdicts)
    return out.getvalue()


def test_elsewhere_than_on_a_terminal_lines_are_plain_and_whole(verdicts: tuple[Verdict, ...]) -> None:
    assert printed(verdicts).splitlines() == [
        "model  snapshot  dtype  KV modes     identical  other",
        "llama  toy       f32    fp, kv8-g64  3          1 DIFFERENT",
        "-      no case   -      -            0          1 STALE_GOLDEN",
        "",
        "DIFFERENT  said [bold]so[/bold]",
        "",
        "STALE_GOLDEN  " + "x" * 300,
        "",
        "5 cases: 3 IDENTICAL, 1 DIFFERENT, 1 STALE_GOLDEN",
    ]


def test_tiny_snapshots_of_a_family_share_a_row_and_many_modes_are_counted(make_case: Callable[..., Case]) -> None:
    cases = [
        make_case(snapshot=f"llama-{form}-tiny", kv=KV(bits=bits))
        for form, bits in zip("abcde", (2, 3, 4, 5, 6), strict=True)
    ]
    verdicts = [Verdict(name=c.name, case=c, status=Status.IDENTICAL, what="", model_type="llama") for c in cases]

    assert summary(verdicts) == [("llama", "tiny", "f32", "kv2-g64, kv3-g64, kv4-g64, 2 more", "5", "-")]


def test_a_terminal_gets_boxes_and_colour(verdicts: tuple[Verdict, ...]) -> None:
    text = printed(verdicts, force_terminal=True, color_system="standard")

    assert "┃" in text
    assert "\x1b[31m" in text
    assert "said [bold]so[/bold]" in text


def test_no_color_is_obeyed(verdicts: tuple[Verdict, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    assert "\x1b[31m" not in printed(verdicts, force_terminal=True, color_system="standard")


def test_the_closing_line_counts_statuses() -> None:
    one = Verdict(name="x", status=Status.IDENTICAL, what="")

    assert closing((one,)) == "1 case: 1 IDENTICAL"
    assert closing(()) == "0 cases: nothing was judged"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert aligned([("a", "bb", "c"), ("aaa", "b", "")]) == ["a    bb  c", "aaa  b"]
