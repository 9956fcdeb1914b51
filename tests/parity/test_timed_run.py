"""The clock of a generation, read from a clock that ticks only where this test says."""

import hashlib
from collections.abc import Iterator

import pytest

from parity import timed_run
from parity.timed_run import timed


class Clock:
    """Time as the number of seconds that were let pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr(timed_run, "time", ticking)
    return ticking


def to_bytes(row: object) -> bytes:
    assert isinstance(row, bytes)
    return row


def generation(clock: Clock, seconds: list[float], last: float = 0.0) -> Iterator[tuple[object, int]]:
    """Rows `row 0`, `row 1`, ... with tokens 10, 11, ...; each takes its seconds, and ending takes `last`."""
    for index, pause in enumerate(seconds):
        clock.now += pause
        yield f"row {index}".encode(), 10 + index
    clock.now += last


def test_the_prompts_clock_ends_with_the_first_token_and_decoding_begins_there(clock: Clock) -> None:
    answer = timed(generation(clock, [5.0, 1.0, 2.0]), to_bytes)
    assert (answer["prompt_seconds"], answer["decode_seconds"]) == (5.0, 3.0)
    assert answer["token_ids"] == [10, 11, 12]


def test_what_the_loop_does_after_its_last_token_is_decoding(clock: Clock) -> None:
    answer = timed(generation(clock, [5.0, 1.0], last=0.5), to_bytes)
    assert (answer["prompt_seconds"], answer["decode_seconds"]) == (5.0, 1.5)


def test_one_token_has_no_decode_time(clock: Clock) -> None:
    answer = timed(generation(clock, [5.0]), to_bytes)
    assert (answer["prompt_seconds"], answer["decode_seconds"], answer["token_ids"]) == (5.0, 0.0, [10])


def test_bits_are_read_after_the_clock_has_stopped(clock: Clock) -> None:
    def slowly(row: object) -> bytes:
        clock.now += 1000
        return to_bytes(row)

    answer = timed(generation(clock, [5.0, 1.0, 2.0]), slowly)
    assert (answer["prompt_seconds"], answer["decode_seconds"]) == (5.0, 3.0)


def test_the_digest_is_over_all_rows_in_order(clock: Clock) -> None:
    answer = timed(generation(clock, [1.0, 1.0, 1.0]), to_bytes)
    assert answer["logits"] == hashlib.sha256(b"row 0row 1row 2").hexdigest()
    turned = timed(reversed(list(generation(clock, [1.0, 1.0, 1.0]))), to_bytes)
    assert turned["logits"] != answer["logits"]


def test_without_a_token_the_prompts_clock_never_ran(clock: Clock) -> None:
    answer = timed(generation(clock, [], last=9.0), to_bytes)
    assert (answer["prompt_seconds"], answer["decode_seconds"], answer["token_ids"]) == (0.0, 9.0, [])
