"""Keys: mlx's own stream, the counter of seed and step, seed 0, and what is no seed."""

from typing import Any

import mlx.core as mx
import pytest

from engine.errors import RequestError
from engine.sampling.keys import CounterKeys, SequentialKeys


@pytest.mark.parametrize("seed", [0, 42, 2**33 + 1, 2**64 - 1])
def test_the_stream_is_the_one_that_mlx_seeds(seed: int) -> None:
    mx.random.seed(seed)
    theirs = [mx.random.uniform(shape=(5,)).tolist() for _ in range(4)]
    keys, ours = SequentialKeys.of(seed), []
    for _ in range(2):
        used, keys = keys.take(2)
        ours += [mx.random.uniform(shape=(5,), key=key).tolist() for key in used]
    assert ours == theirs


def test_neither_source_touches_the_global_stream() -> None:
    mx.random.seed(1)
    expected = mx.random.uniform().item()
    mx.random.seed(1)
    SequentialKeys.of(5).take(3)
    CounterKeys(seed=5).take(2)
    assert mx.random.uniform().item() == expected


def test_a_source_is_a_value() -> None:
    keys = SequentialKeys.of(3)
    (first,), _ = keys.take(1)
    (again,), after = keys.take(1)
    (next_one,), _ = after.take(1)
    assert first.tolist() == again.tolist() != next_one.tolist()


def test_the_counter_gives_the_published_words() -> None:
    keys = CounterKeys(seed=42)
    (key,), after = keys.take(1)
    parts, _ = keys.take(2)

    assert keys.word == 0x9E3779B97F4A7C3F
    assert key.tolist() == [2654435769, 2135587903]
    assert [part.tolist() for part in parts] == [[3244062796, 1926982665], [359914384, 303774217]]
    assert round(mx.random.uniform(key=key).item(), 8) == 0.13344391
    assert round(mx.random.uniform(key=parts[0]).item(), 8) == 0.78905123
    assert after == CounterKeys(seed=42, step=1)


def test_a_step_has_its_key_whatever_was_taken_before() -> None:
    keys: CounterKeys = CounterKeys(seed=7)
    for count in (1, 2, 2):
        _, keys = keys.take(count)
    assert keys.take(1)[0][0].tolist() == CounterKeys(seed=7, step=3).take(1)[0][0].tolist()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, None])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    for make in (SequentialKeys.of, lambda s: CounterKeys(seed=s)):
        with pytest.raises(RequestError) as refused:
            make(seed)
        assert str(refused.value) == (
            f"not a seed\n  given  {seed!r}\n  known  0 to 2**64 - 1\n  next   use a whole number of 64 bits"
        )


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(RequestError, match="a step before the first has no key"):
        CounterKeys(seed=0, step=-1)
