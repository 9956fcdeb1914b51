"""A clear winner is what comparing all differences picks, and is claimed only where no tie can be."""

import mlx.core as mx
import numpy as np
import pytest

from engine.clear_winner import LARGEST, LEAD, MOST_IDS, clear_winner


def compared(logits_BV: mx.array) -> int:
    """By the definition."""
    logprobs_BV = logits_BV - mx.logsumexp(logits_BV, axis=-1, keepdims=True)
    return int(mx.argmax(logprobs_BV, axis=-1)[0].item())


@pytest.mark.parametrize("gap", [0.0, 2.0**-24, 2.0**-21, 2.0**-20, 2.0**-19, 2.0**-18, 0.5])
@pytest.mark.parametrize("most", [-900.0, -3.0, 0.0, 0.25, 7.5, 40.0, 1000.0])
def test_it_is_what_comparing_picks(most: float, gap: float) -> None:
    for seed in range(4):
        row = np.random.default_rng(seed).normal(most - 8, 1, (1, 3000)).astype(np.float32)
        row[0, 2000], row[0, 100] = most, np.float32(most - gap)
        winner = clear_winner(mx.array(row))
        if gap == 0.0:
            assert winner is None
        assert winner in {None, compared(mx.array(row))}
        if gap == 0.5:
            assert winner == 2000


def test_a_tie_that_subtracting_makes_is_left_open() -> None:
    row = np.zeros((1, 60000), np.float32)  # the sum of so many is 11 above them, where differences round to 2^-20
    row[0, 7], row[0, 5] = 2.0**-22, 2.0**-23
    assert compared(mx.array(row)) != 7
    assert clear_winner(mx.array(row)) is None


def test_what_the_proof_does_not_cover_is_left_open() -> None:
    clear = np.array([[0.0, 5.0, 1.0]], np.float32)
    assert clear_winner(mx.array(clear)) == 1
    assert clear_winner(mx.array(clear).astype(mx.bfloat16)) is None
    for bad in (np.nan, np.inf, LARGEST):
        row = clear.copy()
        row[0, 2] = bad
        assert clear_winner(mx.array(row)) is None
    assert clear_winner(mx.full((1, 5), -np.inf)) is None
    assert clear_winner(mx.concatenate([mx.zeros((1, MOST_IDS)), mx.ones((1, 1))], axis=-1)) is None
    low = np.array([[0.0, -np.inf]], np.float32)
    assert clear_winner(mx.array(low)) == 0
    assert LEAD > 2.0**-20
