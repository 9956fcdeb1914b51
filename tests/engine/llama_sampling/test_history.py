import pytest

from engine.errors import RequestError
from engine.llama_sampling.history import TokenHistoryTracker, last_tokens


def test_the_ring_keeps_the_last_n_accepted_tokens_and_counts_them() -> None:
    tracker = TokenHistoryTracker(3)
    for token in (1, 2, 2, 3):
        tracker.accept(token)
    assert tracker.tokens == (2, 2, 3)
    assert tracker.counts() == {2: 2, 3: 1}
    assert tracker.capacity == 3


def test_a_clone_and_a_reset_leave_the_other_alone() -> None:
    tracker = TokenHistoryTracker(3, [1, 2])
    twin = tracker.clone()
    twin.accept(9)
    tracker.reset()
    assert (tracker.tokens, twin.tokens, twin.capacity) == ((), (1, 2, 9), 3)


def test_a_tracker_of_capacity_0_keeps_nothing() -> None:
    tracker = TokenHistoryTracker(0, [1, 2])
    assert (tracker.tokens, tracker.capacity) == ((), 0)


@pytest.mark.parametrize(("count", "kept"), [(-1, [1, 2, 3]), (0, []), (2, [2, 3]), (9, [1, 2, 3])])
def test_a_window_is_the_end_of_the_history(count: int, kept: list[int]) -> None:
    assert list(last_tokens([1, 2, 3], count)) == kept


def test_what_is_no_id_and_no_capacity_is_refused() -> None:
    with pytest.raises(
        RequestError, match="a token id is negative\n  given  -1\n  next   accept ids of the vocabulary"
    ):
        TokenHistoryTracker(2).accept(-1)
    with pytest.raises(RequestError, match="history capacity is out of range\n  given  -1"):
        TokenHistoryTracker(-1)
