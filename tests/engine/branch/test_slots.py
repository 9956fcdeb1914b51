"""A handle finds what it was given out for, or nothing: shown against a dictionary, whatever is added and released."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.branch import slots
from engine.branch.slots import Slots, StaleHandleError
from engine.errors import RequestError


class AgainstADictionary(RuleBasedStateMachine):
    live = Bundle("live")
    gone = Bundle("gone")

    def __init__(self) -> None:
        super().__init__()
        self.table: Slots[str] = Slots(40)
        self.truth: dict[int, str] = {}
        self.ever: set[int] = set()

    @rule(target=live, value=st.text(max_size=3))
    def add(self, value: str) -> int:
        if len(self.truth) == 39:
            with pytest.raises(RequestError, match="every slot is taken"):
                self.table.add(value)
            return next(iter(self.truth))
        handle = self.table.add(value)
        assert handle not in self.ever, "a handle was given out twice"
        self.ever.add(handle)
        self.truth[handle] = value
        return handle

    @rule(target=gone, handle=consumes(live))
    def release(self, handle: int) -> int:
        if handle in self.truth:
            assert self.table.release(handle) == self.truth.pop(handle)
        return handle

    @rule(handle=live, value=st.text(max_size=3))
    def put(self, handle: int, value: str) -> None:
        if handle in self.truth:
            self.table.put(handle, value)
            self.truth[handle] = value

    @rule(handle=gone)
    def stale(self, handle: int) -> None:
        if handle in self.truth:
            return
        assert handle not in self.table
        for use in (self.table.get, self.table.release, lambda h: self.table.put(h, "x")):
            with pytest.raises(StaleHandleError):
                use(handle)

    @invariant()
    def same(self) -> None:
        assert {handle: self.table.get(handle) for handle in self.table.handles()} == self.truth
        assert (len(self.table), self.table.available) == (len(self.truth), 39 - len(self.truth))


AgainstADictionary.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_handles_against_a_dictionary = AgainstADictionary.TestCase


def test_a_table_that_forgets_generations_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GENERATIONS", 2)  # the generation stays 1
    table: Slots[str] = Slots()
    old = table.add("old")
    table.release(old)
    table.add("new")
    assert table.get(old) == "new"


def test_zero_and_invented_handles_find_nothing() -> None:
    table: Slots[str] = Slots()
    table.add("x")
    for handle in (0, -1, 1, 1 << 16, (2 << 16) + 1, (1 << 16) + 40_000):
        assert handle not in table
    assert "x" not in table


def test_a_stale_handle_is_refused_with_what_it_was() -> None:
    table: Slots[str] = Slots()
    handle = table.add("x")
    table.release(handle)
    with pytest.raises(StaleHandleError) as caught:
        table.get(handle)
    assert str(caught.value) == (
        "the branch is gone\n"
        "  handle  place 1, generation 1\n"
        "  live    0\n"
        "  next    use the handle that opening or forking it gave last"
    )


def test_the_table_doubles_and_reuses_the_place_that_was_freed_last() -> None:
    table: Slots[int] = Slots()
    handles = [table.add(number) for number in range(100)]
    assert [handle % slots.PLACES for handle in handles] == list(range(1, 101))
    table.release(handles[3])
    table.release(handles[50])
    assert [table.add(0) % slots.PLACES for _ in range(2)] == [51, 4]


def test_a_full_table_says_so() -> None:
    table: Slots[int] = Slots(3)
    table.add(1)
    table.add(2)
    with pytest.raises(RequestError) as caught:
        table.add(3)
    assert str(caught.value) == "every slot is taken\n  slots  2\n  next   prune branches first"
    assert len(table) == 2


@pytest.mark.parametrize("most", [-1, 0, 1, 65_537])
def test_a_table_without_room_or_beyond_its_handles_is_refused(most: int) -> None:
    with pytest.raises(RequestError) as caught:
        Slots(most)
    assert str(caught.value) == (
        f"no such number of slots\n  given  {most}\n  known  2 to 65536\n  next   choose one of these"
    )


def test_the_largest_table_can_be_filled() -> None:
    table: Slots[int] = Slots()
    assert len([table.add(0) for _ in range(65_535)]) == 65_535
    with pytest.raises(RequestError, match="every slot is taken"):
        table.add(0)
