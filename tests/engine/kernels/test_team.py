"""Every piece is done exactly once whoever comes when, and a missing one is noticed."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from engine.kernels.driver import DONE, NEXT
from engine.kernels.team import Team

LOCK = threading.Lock()


def worker(
    pieces: int, done: list[tuple[int, str]], *, slow: bool = False, forget: bool = False
) -> Callable[[int], int]:
    """What a compiled product does, in Python."""

    def add(address: int, by: int) -> int:
        with LOCK:
            word = ctypes.c_int64.from_address(address)
            before = word.value
            word.value += by
            return before

    def work(control: int) -> int:
        while (piece := add(control + 8 * NEXT, 1)) < pieces:
            if slow:
                time.sleep(0.001)
            done.append((piece, threading.current_thread().name))
            if not (forget and piece == 0):
                add(control + 8 * DONE, 1)
        return add(control + 8 * DONE, 0)

    return work


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_every_piece_is_done_once(threads: int, pieces: int) -> None:
    team = Team(threads=threads)
    for _ in range(20):
        done: list[tuple[int, str]] = []
        team.run(worker(pieces, done), pieces, threads=threads)
        assert sorted(piece for piece, _ in done) == list(range(pieces))


def test_several_threads_take_part() -> None:
    team, done = Team(threads=3), list[tuple[int, str]]()
    team.run(worker(30, done, slow=True), 30, threads=3)
    assert len({name for _, name in done}) == 3


def test_a_call_that_is_worth_one_thread_stays_on_it() -> None:
    team, done = Team(threads=3), list[tuple[int, str]]()
    team.run(worker(30, done, slow=True), 30, threads=1)
    assert {name for _, name in done} == {threading.current_thread().name}


def test_a_missing_piece_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 of 3 pieces of a product were done"):
        Team(threads=1).run(worker(3, [], forget=True), 3, threads=1)
