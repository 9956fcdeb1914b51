"""Taps return what they are given; the innermost watcher sees it, and only within its block."""

import mlx.core as mx
import pytest

from engine.taps import tap, watching


def test_a_tap_without_a_watcher_returns_its_very_argument() -> None:
    x = mx.ones((2,))
    assert tap("a", x) is x


def test_a_watcher_gets_path_and_value_in_order_until_its_block_ends() -> None:
    x, y, seen = mx.ones((2,)), mx.zeros((2,)), []
    with watching(lambda path, value: seen.append((path, value))):
        assert tap("a", x) is x
        tap("b", y)
    tap("c", x)
    assert [path for path, _ in seen] == ["a", "b"]
    assert seen[0][1] is x
    assert seen[1][1] is y


def test_the_inner_of_two_watchers_watches_and_the_outer_resumes() -> None:
    outer: list[str] = []
    inner: list[str] = []
    x = mx.ones((2,))
    with watching(lambda path, _: outer.append(path)):
        tap("a", x)
        with watching(lambda path, _: inner.append(path)):
            tap("b", x)
        tap("c", x)
    assert (outer, inner) == (["a", "c"], ["b"])


def test_a_block_that_fails_stops_watching() -> None:
    seen: list[str] = []

    def fail() -> None:
        with watching(lambda path, _: seen.append(path)):
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match=r"^planted$"):
        fail()
    tap("a", mx.ones((2,)))
    assert seen == []
