"""The draw and the uniforms behind it."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine.sampling.categorical import draw, uniforms_behind


def test_a_single_row_walks_its_cumulative_sum_to_the_uniform(normal: Callable[..., mx.array]) -> None:
    row = normal(1, (1, 500)) * 3
    sums = np.cumsum(np.exp(np.array(row, np.float64)[0]))
    for seed in range(40):
        key = mx.random.key(seed)
        ids_B = draw(row, key)
        u = uniforms_behind(ids_B, 500, key).item()
        assert ids_B.item() == np.searchsorted(sums / sums[-1], u)


def test_several_rows_take_the_largest_noisy_logit(normal: Callable[..., mx.array]) -> None:
    rows = normal(1, (3, 50)) * 3
    for seed in range(20):
        key = mx.random.key(seed)
        ids_B = draw(rows, key)
        u_BV = np.array(mx.random.uniform(shape=(3, 50), key=key), np.float64)
        noisy = np.array(rows, np.float64) - np.log(-np.log(u_BV))
        assert ids_B.tolist() == noisy.argmax(axis=-1).tolist()
        assert uniforms_behind(ids_B, 50, key).tolist() == u_BV[np.arange(3), noisy.argmax(axis=-1)].tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_that_is_ruled_out_is_never_drawn(rows: int) -> None:
    logits = mx.full((rows, 64), -float("inf"))
    logits[:, 17] = -5.0
    logits[:, 40] = -5.0
    ids = {i for seed in range(60) for i in draw(logits, mx.random.key(seed)).tolist()}
    assert ids == {17, 40}
