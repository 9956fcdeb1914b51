from io import StringIO

import pytest
from rich.console import Console

from parity.progress import LongWork, remaining


class Clock:
    """A clock that goes on by `pace` seconds whenever it is read."""

    def __init__(self, pace: float) -> None:
        self.now = 0.0
        self.pace = pace

    def __call__(self) -> float:
        self.now += self.pace
        return self.now


def told(total: int, *, pace: float = 0.0, notable: tuple[int, ...] = (), **options: object) -> str:
    out = StringIO()
    console = Console(file=out, width=120, **options)  # type: ignore[arg-type]
    with LongWork("check", unit="cases", total=total, console=console, clock=Clock(pace)) as work:
        for number in range(total):
            work.tell(
                "DIFFERENT" if number in notable else "IDENTICAL", f"toy/[bold]{number}", notable=number in notable
            )
    return out.getvalue()


def test_elsewhere_than_on_a_terminal_every_tenth_is_a_line() -> None:
    lines = told(30).splitlines()

    assert len(lines) == 10
    assert lines[0] == "3 of 30  IDENTICAL  toy/[bold]2"
    assert lines[-1] == "30 of 30  IDENTICAL  toy/[bold]29"


def test_what_is_notable_has_its_own_line() -> None:
    lines = told(100, notable=(4,)).splitlines()

    assert lines[0] == "5 of 100  DIFFERENT  toy/[bold]4"
    assert len(lines) == 11


def test_once_it_has_gone_on_for_a_while_rate_and_remaining_time_are_told() -> None:
    lines = told(20, pace=5.0).splitlines()

    assert lines[0] == "2 of 20  IDENTICAL  toy/[bold]1", "too early for a rate"
    assert lines[1].startswith("4 of 20  IDENTICAL  toy/[bold]3  (0.")
    assert lines[1].endswith(" left)")
    assert lines[-1] == "20 of 20  IDENTICAL  toy/[bold]19", "nothing is left"


def test_a_terminal_gets_one_live_line_with_bar_rate_remaining_time_and_tally() -> None:
    text = told(3, notable=(1,), force_terminal=True, color_system=None)

    for piece in ("check", "3/3", "2 IDENTICAL, 1 DIFFERENT  toy/[bold]2"):
        assert piece in text
    assert "cases/s" in text or "-:--" in text


def test_colour_is_not_the_only_sign_and_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = told(2, notable=(1,), force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = told(2, notable=(1,), force_terminal=True, color_system="standard")

    assert "\x1b[3" in coloured
    assert "\x1b[3" not in plain
    assert "1 DIFFERENT" in plain


def test_work_that_is_interrupted_leaves_no_live_line() -> None:
    out = StringIO()

    def interrupted() -> None:
        console = Console(file=out, force_terminal=True)
        with LongWork("check", unit="cases", total=2, console=console) as work:
            work.tell("IDENTICAL", "toy")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert out.getvalue().rstrip("\r").endswith("\x1b[2K"), "the last thing written erases the line"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.6, "1 min"), (40, "40 s"), (200, "3 min 20 s"), (3600, "1 h"), (7500, "2 h 5 min")],
)
def test_remaining_time_is_told_in_units_that_people_use(seconds: float, text: str) -> None:
    assert remaining(seconds) == text


def test_what_is_being_done_is_told_too() -> None:
    plain, live = StringIO(), StringIO()
    for out, options in ((plain, {}), (live, {"force_terminal": True, "color_system": None})):
        with LongWork("fetch", unit="snapshots", total=1, console=Console(file=out, width=120, **options)) as work:  # type: ignore[arg-type]
            work.doing("hashing [b]toy")

    assert plain.getvalue() == "hashing [b]toy\n"
    assert "hashing [b]toy" in live.getvalue()
