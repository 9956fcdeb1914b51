"""A clear winner is what comparing all differences picks, and is claimed only where no tie can be."""

import mlx.core as mx
import numpy as np
import pytest

from engine.clear_winner import BOUNDS, MOST_IDS, clear_winner

DTYPES = tuple(BOUNDS)


def compared(logits_BV: mx.array) -> int:
    """By the definition."""
    logprobs_BV = logits_BV - mx.logsumexp(logits_BV, axis=-1, keepdims=True)
    return int(mx.argmax(logprobs_BV, axis=-1)[0].item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leads", [0.0, 2.0**-5, 0.25, 0.5, 1.0, 2.0, 2.0**4])
@pytest.mark.parametrize("most", [-0.9, -0.3, 0.0, 0.01, 0.1, 0.4, 0.95])
def test_it_is_what_comparing_picks(most: float, leads: float, dtype: mx.Dtype) -> None:
    bound = BOUNDS[dtype]
    top, gap = most * bound.largest, leads * bound.lead
    for seed in range(4):
        row = np.random.default_rng(seed).normal(top - 8, 1, (1, 3000)).astype(np.float32)
        row[0, 2000], row[0, 100] = top, np.float32(top - gap)
        logits_BV = mx.array(row).astype(dtype)
        winner = clear_winner(logits_BV)
        if gap == 0.0:
            assert winner is None
        assert winner in {None, compared(logits_BV)}
        if abs(top) < 8 and leads == 2.0**4:
            assert winner == 2000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tie_that_subtracting_makes_is_left_open(dtype: mx.Dtype) -> None:
    row = np.zeros((1, 60000), np.float32)  # the sum of so many is 11 above them: differences are rounded as above 8
    row[0, 7], row[0, 5] = BOUNDS[dtype].lead / 8, BOUNDS[dtype].lead / 16
    logits_BV = mx.array(row).astype(dtype)
    assert compared(logits_BV) != 7
    assert clear_winner(logits_BV) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_proof_does_not_cover_is_left_open(dtype: mx.Dtype) -> None:
    clear = np.array([[0.0, 5.0, 1.0]], np.float32)
    assert clear_winner(mx.array(clear).astype(dtype)) == 1
    for bad in (np.nan, np.inf, BOUNDS[dtype].largest):
        row = clear.copy()
        row[0, 2] = bad
        assert clear_winner(mx.array(row).astype(dtype)) is None
    assert clear_winner(mx.full((1, 5), -np.inf, dtype)) is None
    many = mx.concatenate([mx.zeros((1, MOST_IDS), dtype), mx.ones((1, 1), dtype)], axis=-1)
    assert clear_winner(many) is None
    low = np.array([[0.0, -np.inf]], np.float32)
    assert clear_winner(mx.array(low).astype(dtype)) == 0


def test_a_lead_is_more_than_twice_what_numbers_near_sixteen_are_apart_by() -> None:
    digits = {mx.float32: 24, mx.bfloat16: 8, mx.float16: 11}
    assert all(bound.lead >= 2 * 2.0 ** (4 - digits[dtype]) for dtype, bound in BOUNDS.items())


def test_other_dtypes_are_left_open() -> None:
    assert clear_winner(mx.array([[0, 5, 1]])) is None
