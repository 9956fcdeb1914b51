"""Filters: worked numbers, set definitions in float64, ties at the cut, and what is refused."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.sampling import filters

HALVES = (0.5, 0.25, 0.125, 0.0625, 0.0625)
Kept = Callable[[mx.array], list[list[int]]]
LogOdds = Callable[..., mx.array]
FILTERS: list[Callable[[mx.array], mx.array]] = [
    lambda x: filters.top_p(x, 0.6),
    lambda x: filters.top_p(x, 0.6, rule="mass-below"),
    lambda x: filters.min_p(x, 0.3),
    lambda x: filters.min_p(x, 0.3, keep=3),
    lambda x: filters.xtc(x, mx.array(0.0), probability=1.0, threshold=0.1),
    lambda x: filters.top_k(x, 3),
]


@pytest.mark.parametrize(
    ("p", "above", "below"),
    [
        (0.5, [0], [0]),
        (0.7, [0, 1], [0, 1]),
        (0.75, [0, 1], [0, 1]),
        (0.9, [0, 1, 2, 3, 4], [0, 1, 2, 4]),
        (0.99, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_both_rules_of_top_p_keep_what_the_worked_numbers_say(
    log_odds: LogOdds, kept: Kept, p: float, above: list[int], below: list[int]
) -> None:
    assert kept(filters.top_p(log_odds(*HALVES), p)) == [above]
    assert kept(filters.top_p(log_odds(*HALVES), p, rule="mass-below")) == [below]


def test_tokens_that_tie_with_the_last_one_kept_stay_by_one_rule_alone(log_odds: LogOdds, kept: Kept) -> None:
    row = log_odds(0.4, 0.3, 0.3)

    assert kept(filters.top_p(row, 0.5)) == [[0, 1, 2]]
    assert kept(filters.top_p(row, 0.5, rule="mass-below")) == [[0, 2]]


@pytest.mark.parametrize(
    ("p", "keep", "ids"),
    [(0.2, 1, [0, 1, 2]), (0.25, 1, [0, 1, 2]), (0.5, 1, [0, 1]), (0.9, 3, [0, 1, 2]), (1.0, 1, [0])],
)
def test_min_p_keeps_what_the_worked_numbers_say(
    log_odds: LogOdds, kept: Kept, p: float, keep: int, ids: list[int]
) -> None:
    assert kept(filters.min_p(log_odds(*HALVES), p, keep=keep)) == [ids]


@pytest.mark.parametrize(
    ("threshold", "special", "ids"),
    [(0.1, (), [2, 3]), (0.2, (), [1, 2, 3]), (0.4, (), [0, 1, 2, 3]), (0.1, (0,), [0, 2, 3]), (0.5, (), [0, 1, 2, 3])],
)
def test_xtc_excludes_what_the_worked_numbers_say(
    log_odds: LogOdds, kept: Kept, threshold: float, special: tuple[int, ...], ids: list[int]
) -> None:
    row = log_odds(0.5, 0.3, 0.15, 0.05)
    assert kept(filters.xtc(row, mx.array(0.3), probability=1.0, threshold=threshold, special=special)) == [ids]


def test_xtc_happens_where_the_uniform_is_not_above_the_probability(log_odds: LogOdds, kept: Kept) -> None:
    row = log_odds(0.5, 0.3, 0.15, 0.05)
    outcome = {u: kept(filters.xtc(row, mx.array(u), probability=0.5, threshold=0.1))[0] for u in (0.25, 0.5, 0.75)}
    assert outcome == {0.25: [2, 3], 0.5: [2, 3], 0.75: [0, 1, 2, 3]}


def test_ties_at_rank_k_leave_the_lower_ids_and_min_tokens_the_higher(kept: Kept) -> None:
    row = mx.array([[1.0, 2.0, 2.0, 2.0, 1.0, 2.0]])

    assert kept(filters.top_k(row, 2)) == [[1, 2]]
    assert kept(filters.min_p(row - 2.0, 1.0, keep=5)) == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rows_are_filtered_each_by_itself_and_the_input_stays_as_it_is(
    normal: Callable[..., mx.array],
    same_bits: Callable[[Any, Any], None],
    filtered: Callable[[mx.array], mx.array],
    dtype: mx.Dtype,
) -> None:
    rows = normal(3, (4, 50), dtype)
    rows = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    before = np.array(rows.view(mx.uint16 if dtype == mx.bfloat16 else mx.uint32)).copy()

    together = filtered(rows)

    for index in range(4):
        same_bits(filtered(rows[index : index + 1]), together[index : index + 1])
    assert np.array_equal(np.array(rows.view(mx.uint16 if dtype == mx.bfloat16 else mx.uint32)), before)


rows_without_ties = st.lists(st.integers(-4000, 4000), min_size=2, max_size=40, unique=True)


def _log_probabilities(values: list[int]) -> tuple[mx.array, np.ndarray[Any, np.dtype[np.float64]]]:
    z = np.array(values, np.float64) / 256  # exact in float32
    p = np.exp(z - z.max())
    row = mx.array((z - z.max() - np.log(p.sum())).astype(np.float32))[None]
    return row, p / p.sum()


@given(values=rows_without_ties, p=st.floats(0.01, 0.99))
@settings(max_examples=80, deadline=None)
def test_top_p_keeps_the_smallest_head_that_holds_p(kept: Kept, values: list[int], p: float) -> None:
    row, shares = _log_probabilities(values)
    order = np.argsort(-shares)
    above = np.concatenate([[0.0], np.cumsum(shares[order])[:-1]])
    if np.abs(above - p).min() < 1e-5:
        return  # the cut itself: float32 decides there, and the goldens judge it
    assert kept(filters.top_p(row, p)) == [sorted(order[above < p].tolist())]


@given(values=rows_without_ties, p=st.floats(0.001, 1.0))
@settings(max_examples=80, deadline=None)
def test_min_p_keeps_all_that_reach_the_share_of_the_best(kept: Kept, values: list[int], p: float) -> None:
    row, shares = _log_probabilities(values)
    ratio = shares / shares.max()
    if np.abs(ratio / p - 1).min() < 1e-5 and p < 1:
        return
    assert kept(filters.min_p(row, p)) == [np.flatnonzero(ratio >= p).tolist()]


@given(values=rows_without_ties, data=st.data())
@settings(max_examples=80, deadline=None)
def test_top_k_keeps_the_k_best(kept: Kept, values: list[int], data: st.DataObject) -> None:
    row, shares = _log_probabilities(values)
    k = data.draw(st.integers(1, len(values) - 1))
    assert kept(filters.top_k(row, k)) == [sorted(np.argsort(-shares)[:k].tolist())]


@given(
    values=st.lists(st.sampled_from([-3.0, -2.0, -1.0, 0.0, -float("inf")]), min_size=4, max_size=30).filter(
        lambda v: max(v) > -9
    ),
    which=st.integers(0, len(FILTERS) - 1),
)
@settings(max_examples=120, deadline=None)
def test_at_least_one_token_survives_whatever_ties_or_is_ruled_out(kept: Kept, values: list[float], which: int) -> None:
    row = mx.array([values])
    out = FILTERS[which](row - mx.logsumexp(row, axis=-1, keepdims=True))
    assert kept(out)[0]
    assert not np.isnan(np.array(out)).any()


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda x: filters.top_p(x, 0.0), "top_p is not a share"),
        (lambda x: filters.top_p(x, 1.0), "top_p is not a share"),
        (lambda x: filters.top_p(x, 0.5, rule="newest"), "unknown rule for top_p"),
        (lambda x: filters.min_p(x, 0.0), "min_p is not a share"),
        (lambda x: filters.min_p(x, 1.5), "min_p is not a share"),
        (lambda x: filters.min_p(x, 0.5, keep=0), "min_tokens_to_keep is not a number of tokens"),
        (lambda x: filters.min_p(x, 0.5, keep=6), "min_tokens_to_keep is not a number of tokens"),
        (
            lambda x: filters.xtc(x, mx.array(0.0), probability=1.1, threshold=0.1),
            "xtc_probability is not a probability",
        ),
        (lambda x: filters.xtc(x, mx.array(0.0), probability=1.0, threshold=0.6), "xtc_threshold is out of range"),
        (
            lambda x: filters.xtc(x, mx.array(0.0), probability=1.0, threshold=0.1, special=(5,)),
            "xtc_special names tokens outside the vocabulary",
        ),
        (lambda x: filters.top_k(x, 0), "top_k is not a number of tokens to keep"),
        (lambda x: filters.top_k(x, 5), "top_k is not a number of tokens to keep"),
        (lambda x: filters.top_k(x, 2.0), "top_k is not a number of tokens to keep"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    log_odds: LogOdds, call: Callable[[mx.array], mx.array], what: str
) -> None:
    with pytest.raises(RequestError, match=r"\n  next +") as refused:
        call(log_odds(*HALVES))
    assert refused.value.what == what


def test_the_message_of_top_k_names_what_is_possible(log_odds: LogOdds) -> None:
    with pytest.raises(RequestError) as refused:
        filters.top_k(log_odds(*HALVES), 5)
    assert str(refused.value) == (
        "top_k is not a number of tokens to keep\n  given  5\n  known  1 to 4\n  next   leave it out to keep all"
    )
