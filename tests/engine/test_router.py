"""Routers with a corrected choice: who is chosen, what they weigh, and which numbers are refused."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.linear import Linear
from engine.router import Choice, LinearRouter, SigmoidRouter, choose
from engine.taps import watching

PLAIN = Choice(experts=8, chosen=2, groups=4, kept=2, factor=2.0)
ZEROS = mx.zeros((8,))


def row(*scores: float) -> mx.array:
    return mx.array([[scores]])


def chosen(scores: mx.array, bias: mx.array, choice: Choice) -> set[int]:
    ids, _ = choose(scores, bias, choice)
    return set(np.array(ids)[0, 0].tolist())


SCORES = row(0.9, 0.1, 0.5, 0.55, 0.2, 0.3, 0.6, 0.7)  # sums of groups: 1.0, 1.05, 0.5, 1.3


def test_experts_are_chosen_from_the_better_groups_alone() -> None:
    assert chosen(SCORES, ZEROS, PLAIN) == {6, 7}, "0.9 stands in a group that is left out"
    assert chosen(SCORES, ZEROS, replace(PLAIN, kept=3)) == {0, 7}
    assert chosen(SCORES, ZEROS, replace(PLAIN, groups=1, kept=1)) == {0, 7}


def test_the_correction_decides_and_does_not_weigh(same_bits: Callable[..., None]) -> None:
    bias = mx.array([0, 0, 0, 0, 9.0, 8.0, 0, 0])
    ids, weights = choose(SCORES, bias, PLAIN)
    order = np.array(ids)[0, 0].tolist()
    assert set(order) == {4, 5}
    taken = mx.take(SCORES[0, 0], ids[0, 0])
    same_bits((taken / taken.sum() * 2.0)[None, None], weights)


def test_weights_sum_to_the_factor_only_if_they_are_normalised(same_bits: Callable[..., None]) -> None:
    _, weights = choose(row(0.25, 0.5, 0, 0, 0, 0, 0, 0), ZEROS, replace(PLAIN, normalised=False))
    same_bits(mx.array([0.5, 1.0]), mx.sort(weights[0, 0]))
    _, weights = choose(row(0.25, 0.75, 0, 0, 0, 0, 0, 0), ZEROS, PLAIN)
    same_bits(mx.array([0.5, 1.5]), mx.sort(weights[0, 0]))


def test_a_single_expert_is_never_normalised(same_bits: Callable[..., None]) -> None:
    _, weights = choose(SCORES, ZEROS, replace(PLAIN, chosen=1))
    same_bits(mx.array([[[1.4]]]), weights)


def test_a_floor_keeps_weights_of_nothing_finite() -> None:
    _, weights = choose(row(*[0.0] * 8), ZEROS, replace(PLAIN, floor=1e-20))
    assert np.array(weights).tolist() == [[[0.0, 0.0]]]


def test_experts_left_out_count_as_nought_so_they_can_beat_negative_ones() -> None:
    assert chosen(row(*[0.5] * 6, 0.9, 0.9), mx.array([-0.9] * 8), replace(PLAIN, kept=1, chosen=2)).isdisjoint({6, 7})


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_chosen_experts_are_distinct_and_all_from_groups_that_are_kept(seed: int, kept: int, k: int) -> None:
    scores = mx.array(np.random.default_rng(seed).uniform(0.01, 1, (1, 5, 12)).astype(np.float32))
    choice = Choice(experts=12, chosen=k, groups=4, kept=kept)
    ids = np.array(choose(scores, mx.zeros((12,)), choice)[0])[0]
    sums = np.sort(np.array(scores)[0].reshape(5, 4, 3), axis=-1)[..., -2:].sum(-1, dtype=np.float32)
    for token, own in enumerate(ids):
        assert len(set(own.tolist())) == k
        best = set(np.argsort(-sums[token], kind="stable")[:kept].tolist())
        assert {int(i) // 3 for i in own} <= best


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_sigmoid_router_scores_in_float32_and_a_linear_one_in_its_own_dtype(
    normal: Callable[..., mx.array], dtype: mx.Dtype
) -> None:
    x, weight, bias = normal(0, (1, 3, 16), dtype), normal(1, (8, 16), dtype), normal(2, (8,), dtype)
    _, weights = SigmoidRouter(path="r", weight=weight, bias=bias, choice=PLAIN)(x)
    assert weights.dtype == mx.float32
    _, weights = LinearRouter(linear=Linear(path="r", weight=weight), bias=bias, choice=PLAIN)(x)
    assert weights.dtype == dtype


def test_a_sigmoid_router_shows_the_ids_that_it_chose_and_a_linear_one_its_logits_alone(
    normal: Callable[..., mx.array], same_bits: Callable[..., None]
) -> None:
    x, weight, bias = normal(0, (1, 3, 16)), normal(1, (8, 16)), normal(2, (8,))
    seen: dict[str, mx.array] = {}
    with watching(seen.__setitem__):
        ids, _ = SigmoidRouter(path="m.gate", weight=weight, bias=bias, choice=PLAIN)(x)
    assert list(seen) == ["m.gate"]
    assert seen["m.gate"].dtype == mx.uint32
    same_bits(ids, seen["m.gate"])
    seen.clear()
    with watching(seen.__setitem__):
        LinearRouter(linear=Linear(path="m.gate", weight=weight), bias=bias, choice=PLAIN)(x)
    assert list(seen) == ["m.gate"]
    same_bits(x @ weight.T, seen["m.gate"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"chosen": 0},
        {"chosen": 5},
        {"groups": 3},
        {"groups": 8},
        {"kept": 5},
        {"kept": 0},
        {"groups": 0},
        {"experts": 0},
    ],
)
def test_numbers_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    PLAIN.check({})
    with pytest.raises(ConfigError) as caught:
        replace(PLAIN, **wrong).check({"n_experts": 8})  # type: ignore[arg-type]
    assert str(caught.value) == (
        "the experts of config.json do not fit together\n  n experts  8\n  next       mend config.json"
    )
