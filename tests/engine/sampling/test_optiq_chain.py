"""mlx-optiq's chain: its order is not mlx-lm's, and its draw keeps a floor under every token."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.errors import RequestError
from engine.sampling.keys import SequentialKeys
from engine.sampling.optiq_chain import OptiqChain, filtered, sample

LogOdds = Callable[..., mx.array]
Kept = Callable[[mx.array], list[list[int]]]


def test_temperature_comes_before_the_filters(log_odds: LogOdds, kept: Kept) -> None:
    row = log_odds(0.5, 0.25, 0.125, 0.0625, 0.0625)
    assert kept(filtered(row, OptiqChain(temperature=1.0, min_p=0.4))) == [[0, 1]]
    assert kept(filtered(row, OptiqChain(temperature=100.0, min_p=0.4))) == [[0, 1, 2, 3, 4]]


def test_top_k_comes_before_top_p(log_odds: LogOdds, kept: Kept) -> None:
    row = log_odds(0.4, 0.3, 0.2, 0.1)
    # of the two that top-k leaves the first holds 4/7 of the mass, so top-p cuts the second; of all four it would not
    assert kept(filtered(row, OptiqChain(temperature=1.0, top_k=2, top_p=0.55))) == [[0]]
    assert kept(filtered(row, OptiqChain(temperature=1.0, top_p=0.55))) == [[0, 1]]


def test_the_draw_is_from_the_logarithm_of_floored_shares(normal: Callable[..., mx.array]) -> None:
    row, chain = normal(2, (1, 300)), OptiqChain(temperature=0.8, top_k=50)
    keys, ours, theirs = SequentialKeys.of(11), [], []
    mx.random.seed(11)
    for _ in range(50):
        ids_B, keys = sample(row, chain, keys)
        ours.append(ids_B.item())
        scaled = row / 0.8
        cut = mx.sort(scaled, axis=-1)[:, -50:][:, :1]
        p = mx.softmax(mx.where(scaled < cut, -mx.inf, scaled), axis=-1)
        theirs.append(mx.random.categorical(mx.log(p + 1e-30)[0]).item())  # a vector: Gumbel noise
    assert ours == theirs
    assert len(set(ours)) > 10


def test_greedy_takes_the_best_logit(normal: Callable[..., mx.array]) -> None:
    row = normal(2, (2, 30))
    assert sample(row, OptiqChain(), SequentialKeys.of(0))[0].tolist() == np.array(row).argmax(axis=-1).tolist()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"temperature": -0.1}, "temperature is out of range"),
        ({"top_p": 2.0}, "top_p is out of range"),
        ({"min_p": -1.0}, "min_p is out of range"),
        ({"top_k": -1}, "top_k is out of range"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=r"\n  next +") as refused:
        OptiqChain(**options)
    assert refused.value.what == what
