"""The chain: its order, greedy, the published draws, distributions, and what is refused."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.sampling.chain import Chain, filtered, sample
from engine.sampling.keys import CounterKeys, SequentialKeys

HALVES = (0.5, 0.25, 0.125, 0.0625, 0.0625)
LogOdds = Callable[..., mx.array]
Kept = Callable[[mx.array], list[list[int]]]


def shares(logits: mx.array, temperature: float) -> list[float]:
    rounded: list[float] = np.array(mx.softmax(logits / temperature, axis=-1)).astype(np.float64)[0].round(6).tolist()
    return rounded


def drawn(row: mx.array, chain: Chain, keys: Any, count: int) -> list[int]:
    ids = []
    for _ in range(count):
        id_B, keys = sample(row, chain, keys)
        ids.append(id_B[0].item())
    return ids


def test_counter_keys_draw_the_published_ids(log_odds: LogOdds) -> None:
    row, chain = log_odds(*HALVES), Chain(temperature=0.7)
    assert drawn(row, chain, CounterKeys(seed=42), 8) == [0, 0, 3, 0, 0, 2, 0, 2]
    assert drawn(row, chain, CounterKeys(seed=0), 8) == [0] * 8


def test_four_thousand_draws_have_the_published_frequencies(log_odds: LogOdds) -> None:
    ids = drawn(log_odds(*HALVES), Chain(temperature=1.0), CounterKeys(seed=7), 4000)
    assert (np.bincount(ids, minlength=5) / 4000).tolist() == [0.49275, 0.2525, 0.12775, 0.059, 0.068]


@pytest.mark.parametrize("rows", [1, 3])
def test_draws_follow_the_distribution_alone_and_in_a_batch(log_odds: LogOdds, rows: int) -> None:
    chain, keys, count = Chain(temperature=1.0), SequentialKeys.of(3), 1500
    batch = mx.broadcast_to(log_odds(*HALVES), (rows, 5))
    seen = np.zeros((rows, 5))
    for _ in range(count):
        ids_B, keys = sample(batch, chain, keys)
        seen[np.arange(rows), np.array(ids_B)] += 1
    p = np.array(HALVES)
    assert (np.abs(seen / count - p) < 4 * np.sqrt(p * (1 - p) / count)).all()


def test_top_p_and_temperature_give_the_worked_shares(log_odds: LogOdds) -> None:
    row = log_odds(*HALVES)
    new = filtered(row, Chain(temperature=0.7, top_p=0.9))
    old = filtered(row, Chain(temperature=0.7, top_p=0.9, top_p_rule="mass-below"))
    assert shares(new, 0.7) == [0.620327, 0.230451, 0.085612, 0.031805, 0.031805]
    assert shares(old, 0.7) == [0.640705, 0.238021, 0.088424, 0.0, 0.03285]


def test_xtc_comes_after_top_p_and_before_top_k(log_odds: LogOdds, kept: Kept) -> None:
    row = log_odds(0.45, 0.3, 0.12, 0.08, 0.05)
    chain = Chain(temperature=1.0, top_p=0.8, xtc_probability=1.0, xtc_threshold=0.13, top_k=1)
    # top-p leaves 0 to 2; of their renormalised shares 0.138 is likely too, so XTC excludes 0 and 1; top-k takes the rest
    assert kept(filtered(row, chain, mx.array(0.0))) == [[2]]
    # XTC first: 0.12 is not above 0.13, so only 0 goes
    assert kept(filtered(row, Chain(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.13), mx.array(0.0))) == [
        [1, 2, 3, 4]
    ]


def test_filters_see_log_probabilities_before_temperature(log_odds: LogOdds) -> None:
    chain = Chain(temperature=100.0, min_p=0.4)  # at that temperature all tokens would pass
    assert set(drawn(log_odds(*HALVES), chain, SequentialKeys.of(1), 50)) == {0, 1}


def test_greedy_takes_the_lowest_id_of_the_best_and_looks_at_no_filter() -> None:
    row = mx.array([[0.0, 3.0, 3.0, -1.0]])
    keys = SequentialKeys.of(0)
    ids, after = sample(row, Chain(top_k=99, top_p=0.1), keys)
    assert ids.tolist() == [1]
    assert after is keys


def test_a_low_temperature_is_greedy_and_a_high_one_is_flat(log_odds: LogOdds) -> None:
    row = log_odds(*HALVES)
    assert set(drawn(row, Chain(temperature=0.01), SequentialKeys.of(5), 100)) == {0}
    counts = np.bincount(drawn(row, Chain(temperature=1e6), SequentialKeys.of(5), 1000), minlength=5)
    assert (np.abs(counts / 1000 - 0.2) < 4 * np.sqrt(0.16 / 1000)).all()


@given(seed=st.integers(0, 2**64 - 1), rows=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_one_seed_gives_one_sequence(normal: Callable[..., mx.array], seed: int, rows: int) -> None:
    batch, chain = normal(9, (rows, 200)), Chain(temperature=1.0, top_p=0.9)

    def run(seed: int) -> list[list[int]]:
        keys, out = SequentialKeys.of(seed), []
        for _ in range(12):
            ids_B, keys = sample(batch, chain, keys)
            out.append(ids_B.tolist())
        return out

    assert run(seed) == run(seed)
    assert run(seed) != run(seed ^ 1), "two seeds that agree 12 times in a row"


def test_seed_zero_is_a_seed(normal: Callable[..., mx.array]) -> None:
    row, chain = normal(9, (1, 200)), Chain(temperature=1.0)
    zero = drawn(row, chain, SequentialKeys.of(0), 20)
    assert zero == drawn(row, chain, SequentialKeys.of(0), 20)
    assert len(set(zero)) > 5
    assert zero != drawn(row, chain, SequentialKeys.of(1), 20)


def test_a_row_of_a_batch_draws_the_same_id_whatever_the_other_rows_hold(normal: Callable[..., mx.array]) -> None:
    one, other, third = normal(1, (1, 100)), normal(2, (1, 100)), normal(3, (1, 100))
    chain = Chain(temperature=1.0, min_p=0.01)
    first = sample(mx.concatenate([one, other]), chain, SequentialKeys.of(4))[0].tolist()
    second = sample(mx.concatenate([one, third]), chain, SequentialKeys.of(4))[0].tolist()
    assert first[0] == second[0]


def test_xtc_takes_a_key_of_its_own_before_the_draw() -> None:
    assert [Chain(**o).num_keys for o in ({}, {"temperature": 1.0}, {"temperature": 1.0, "xtc_probability": 0.1})] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"temperature": -1.0}, "temperature is out of range"),
        ({"temperature": float("nan")}, "temperature is out of range"),
        ({"temperature": float("inf")}, "temperature is out of range"),
        ({"top_p": 1.5}, "top_p is out of range"),
        ({"min_p": -0.1}, "min_p is out of range"),
        ({"top_p_rule": "newest"}, "unknown rule for top_p"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep is not a number of tokens"),
        ({"xtc_probability": 2.0}, "xtc_probability is not a probability"),
        ({"xtc_threshold": 0.51}, "xtc_threshold is out of range"),
        ({"top_k": -1}, "top_k is out of range"),
        ({"top_k": 2.5}, "top_k is out of range"),
    ],
)
def test_options_out_of_range_are_refused_when_they_are_made(options: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=r"\n  next +") as refused:
        Chain(**options)
    assert refused.value.what == what


def test_xtc_without_its_uniform_is_refused(log_odds: LogOdds) -> None:
    with pytest.raises(ValueError, match="XTC needs a uniform"):
        filtered(log_odds(0.5, 0.5), Chain(temperature=1.0, xtc_probability=1.0))
