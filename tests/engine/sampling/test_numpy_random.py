"""The numpy random numbers are mlx's."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.sampling import numpy_random as random
from engine.sampling.keys import CounterKeys

SEEDS = (0, 42, 2**33 + 1, 2**64 - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_and_splits_are_those_of_mlx(seed: int) -> None:
    key = random.key_of(seed)
    assert list(key) == mx.random.key(seed).tolist()
    for count in (2, 3, 5):
        assert [list(k) for k in random.split(key, count)] == mx.random.split(mx.random.key(seed), count).tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 147_456])
def test_uniforms_are_those_of_mlx(same_bits: Callable[[Any, Any], None], seed: int, count: int) -> None:
    same_bits(mx.random.uniform(shape=(count,), key=mx.random.key(seed)), random.uniforms(random.key_of(seed), count))


def test_the_counter_has_the_keys_of_the_engine() -> None:
    for step in (0, 1, 99):
        (key,), _ = CounterKeys(seed=42, step=step).take(1)
        assert list(random.counter_key(42, step)) == key.tolist()


def test_gumbel_noise_is_close_to_that_of_mlx() -> None:
    key = random.key_of(7)
    theirs = np.array(mx.random.gumbel((20_000,), key=mx.random.key(7)))
    ours = random.gumbel(random.uniforms(key, 20_000))
    assert np.abs(ours - theirs).max() <= 2.0**-20
    assert (ours != theirs).mean() < 0.02


def test_the_published_first_words_of_threefry() -> None:
    # Salmon et al.'s known answers for 20 rounds of 2x32
    x, y = random.threefry((0, 0), np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    assert (int(x[0]), int(y[0])) == (0x6B200159, 0x99BA4EFE)
    ones = np.full(1, 0xFFFFFFFF, np.uint32)
    x, y = random.threefry((0xFFFFFFFF, 0xFFFFFFFF), ones, ones)
    assert (int(x[0]), int(y[0])) == (0x1CB996FC, 0xBB002BE7)
