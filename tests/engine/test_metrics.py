"""Surprisal, entropy and perplexity of rows whose figures are known."""

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.metrics import (
    RollingPerplexity,
    SequenceMetrics,
    entropy,
    log_softmax,
    perplexity,
    sampling_surprisal,
    surprisal,
)

Ulps = Callable[..., int]
INF = float("inf")


def close(ulps: Ulps, expected: float, actual: float, bound: int = 4) -> bool:
    return ulps(np.array([expected]), np.array([actual], dtype=np.float64)) <= bound


@pytest.mark.parametrize("size", [1, 2, 128, 49152])
@pytest.mark.parametrize("level", [0.0, 5.5, -100.0])
def test_a_uniform_row_has_the_entropy_and_surprisal_of_its_size(ulps: Ulps, size: int, level: float) -> None:
    row = mx.full((1, size), level)
    assert close(ulps, math.log(size), entropy(row)[0])
    assert close(ulps, math.log(size), surprisal(row, [size - 1])[0])


def test_a_row_that_leaves_one_token_has_no_entropy() -> None:
    row = mx.array([[-INF, 3.0, -INF]])
    assert entropy(row).tolist() == [0.0]
    assert surprisal(row, [1]).tolist() == [0.0]
    assert surprisal(row, [0]).tolist() == [INF]


def test_tokens_that_are_ruled_out_do_not_count(ulps: Ulps) -> None:
    assert close(ulps, math.log(3), entropy(mx.array([[1.0, -INF, 1.0, 1.0, -INF]]))[0])


def test_log_probabilities_are_those_of_known_odds(ulps: Ulps) -> None:
    row = mx.log(mx.array([[1.0, 2.0, 4.0, 1.0]]))  # float32 logarithms: exact to 1e-7
    assert log_softmax(row)[0].round(6).tolist() == [round(math.log(p), 6) for p in (0.125, 0.25, 0.5, 0.125)]
    exact = log_softmax(mx.array([[0.0, 0.0, 0.0, 0.0]]))
    assert close(ulps, math.log(0.25), exact[0, 0])


def test_rows_are_kept_apart_and_large_logits_do_not_overflow(ulps: Ulps) -> None:
    rows = mx.array([[1e4, 1e4], [-1e4, -1e4], [0.0, 1e4]])
    assert [close(ulps, math.log(2), value) for value in entropy(rows)[:2]] == [True, True]
    assert entropy(rows)[2] == 0.0
    assert log_softmax(rows).shape == (3, 2)
    assert entropy(rows[None]).shape == (1, 3)


@given(values=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=20))
@settings(max_examples=40, deadline=None)
def test_probabilities_sum_to_one_and_entropy_is_the_mean_surprisal(ulps: Ulps, values: list[float]) -> None:
    row = mx.array([values])
    logp = log_softmax(row)
    assert close(ulps, 1.0, np.exp(logp).sum(), bound=64)
    expected = math.fsum(-math.exp(p) * p for p in logp[0])
    assert abs(expected - entropy(row)[0]) <= len(values) * 2.0**-50 * max(1.0, expected)  # near 0 ULPs say nothing


def test_a_bfloat16_row_is_read_as_the_values_that_it_stores() -> None:
    row = mx.array([[0.1, 0.2, 7.3]]).astype(mx.bfloat16)
    assert log_softmax(row).tolist() == log_softmax(row.astype(mx.float32)).tolist()


def test_perplexity_is_the_exponential_of_the_mean_surprisal(ulps: Ulps) -> None:
    assert close(ulps, 8.0, perplexity(mx.zeros((3, 8)), [0, 7, 3]), bound=16)
    two_and_eight = mx.array([[0.0, 0.0] + [-INF] * 6, [0.0] * 8])
    assert close(ulps, 4.0, perplexity(two_and_eight, [1, 5]), bound=16)  # sqrt(2 * 8)
    assert perplexity(mx.array([[0.0, -INF]]), [0]) == 1.0


def test_each_row_predicts_the_token_of_its_place() -> None:
    rows = mx.array([[0.0, -INF], [-INF, 0.0]])
    assert perplexity(rows, [0, 1]) == 1.0
    assert perplexity(rows, [1, 0]) == INF


def test_more_rows_than_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="rows"):
        perplexity(mx.zeros((3, 8)), [0, 1])


def test_the_worked_numbers_hold_in_every_base() -> None:
    row = mx.array([[2.0, 1.0, 0.5, -1.0, -INF]])

    assert entropy(row).round(6).tolist() == [1.014403]
    assert entropy(row, base="bits").round(6).tolist() == [1.463474]
    assert entropy(row, base="base10").round(6).tolist() == [round(1.014403 / math.log(10), 6)]
    assert surprisal(row, [1]).round(6).tolist() == [1.495182]
    assert surprisal(row, [1], base="bits").round(6).tolist() == [2.157092]
    assert surprisal(row, [0]).round(6).tolist() == [0.495182]
    assert surprisal(row, [4]).tolist() == [INF]


def test_an_unknown_base_is_refused() -> None:
    row = mx.zeros((1, 4))
    for call in (lambda: surprisal(row, [0], base="hartley"), lambda: entropy(row, base="hartley")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="unknown base 'hartley'; known are nats, bits, base10"):
            call()


def test_rolling_perplexity_has_the_worked_value_and_forks_by_being_kept() -> None:
    row = mx.array([[2.0, 1.0, 0.5, -1.0, -INF]])
    told = RollingPerplexity()
    assert told.value == INF
    for nats in surprisal(mx.broadcast_to(row, (3, 5)), [0, 1, 2]):
        told = told.add(float(nats))
    fork = told.add(5.0)

    assert round(told.value, 6) == 3.775434
    assert (told.count, fork.count) == (3, 4)
    assert fork.value > told.value


@given(st.lists(st.floats(0, 20), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_rolling_perplexity_is_perplexity(values: list[float]) -> None:
    told = RollingPerplexity()
    for nats in values:
        told = told.add(nats)
    assert math.isclose(told.value, math.exp(math.fsum(values) / len(values)), rel_tol=1e-12)


@pytest.mark.parametrize("odd", [INF, -INF, float("nan")])
def test_what_is_not_finite_is_passed_over_and_negatives_count_as_certain(odd: float) -> None:
    told = RollingPerplexity().add(1.0)
    assert told.add(odd) == told
    assert told.add(-0.5) == RollingPerplexity(nats=1.0, count=2)


def test_sampling_surprisal_is_among_the_tokens_that_were_left() -> None:
    kept = mx.array([[1.0, 1.0, -INF, -INF], [-INF, 0.5, -INF, -INF]])
    rows = mx.concatenate([kept, kept])
    assert sampling_surprisal(rows, [0, 1, 2, 1], base="bits").round(9).tolist() == [1.0, 0.0, INF, 0.0]
    warm = sampling_surprisal(mx.array([[2.0, 0.0]]), [0], temperature=2.0)
    assert warm.round(6).tolist() == surprisal(mx.array([[1.0, 0.0]]), [0]).round(6).tolist()
    with pytest.raises(ValueError, match="no distribution at temperature 0"):
        sampling_surprisal(kept, [0, 1], temperature=0)


def test_both_perplexities_of_a_sequence_are_kept_apart() -> None:
    told = SequenceMetrics().accept(model_nats=2.0, sampling_nats=1.0).accept(model_nats=4.0)
    assert (told.model.count, told.sampling.count) == (2, 1)
    assert math.isclose(told.model.value, math.exp(3))
    assert math.isclose(told.sampling.value, math.e)
