"""The delta rule: exact where arithmetic is, without a seam between pieces, and each of its inputs does its own work."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.gated_delta import DeltaHeads, decay_factors, gated_delta, unit_queries_and_keys

Normal = Callable[..., mx.array]
Check = Callable[..., None]
Ulps = Callable[[mx.array, mx.array], int]


def one_hot(rows: Sequence[int], width: int) -> mx.array:
    """[1, L, 1, width], a 1 at the row's place."""
    return mx.array(np.eye(width, dtype=np.float32)[list(rows)][None, :, None])


def inputs(normal: Normal, L: int, *, K: int = 2, H: int = 4, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Any:
    E, V = 5, 3
    q, k = unit_queries_and_keys(normal(seed, (2, L, K, E), dtype), normal(seed + 1, (2, L, K, E), dtype))
    return (
        (q, k, normal(seed + 2, (2, L, H, V), dtype)),
        {
            "decay": mx.sigmoid(normal(seed + 3, (2, L, H))),
            "beta_BLH": mx.sigmoid(normal(seed + 4, (2, L, H), dtype)),
            "state": normal(seed + 5, (2, H, V, E)),
        },
    )


# with decay 1, strength 1 and keys along the axes every sum is exact


def test_what_was_stored_under_a_key_is_read_by_it(same_bits: Check) -> None:
    values = mx.array([[[[1.5, -2.0]], [[0.25, 8.0]], [[-3.0, 0.5]]]])  # [1, 3, 1, 2]
    ones = mx.ones((1, 3, 1))
    stored, state = gated_delta(
        one_hot([0, 1, 2], 4), one_hot([0, 1, 2], 4), values, decay=ones, beta_BLH=ones, state=None
    )
    same_bits(values, stored)
    nothing = mx.zeros((1, 3, 1))
    read, after = gated_delta(
        one_hot([2, 0, 3], 4), one_hot([0, 0, 0], 4), values, decay=ones, beta_BLH=nothing, state=state
    )
    same_bits(mx.array([[[[-3.0, 0.5]], [[1.5, -2.0]], [[0.0, 0.0]]]]), read)
    same_bits(state, after)


def test_a_second_value_under_a_key_replaces_the_first_by_its_strength(same_bits: Check) -> None:
    values = mx.array([[[[4.0, -8.0]], [[2.0, 2.0]]]])
    read, _ = gated_delta(
        one_hot([1, 1], 3),
        one_hot([1, 1], 3),
        values,
        decay=mx.ones((1, 2, 1)),
        beta_BLH=mx.array([[[1.0], [0.5]]]),
        state=None,
    )
    same_bits(mx.array([[[[4.0, -8.0]], [[3.0, -3.0]]]]), read)


def test_decay_comes_before_the_correction(same_bits: Check) -> None:
    read, _ = gated_delta(
        one_hot([0, 0], 3),
        one_hot([0, 1], 3),
        mx.array([[[[4.0, -8.0]], [[2.0, 2.0]]]]),
        decay=mx.array([[[0.25], [0.5]]]),
        beta_BLH=mx.ones((1, 2, 1)),
        state=None,
    )
    same_bits(mx.array([[[[4.0, -8.0]], [[2.0, -4.0]]]]), read)


def test_a_factor_a_column_decays_that_column_alone(same_bits: Check) -> None:
    state = mx.array([[[[4.0, 8.0, 16.0]]]])
    nothing = mx.zeros((1, 1, 1))
    _, after = gated_delta(
        one_hot([0], 3),
        one_hot([0], 3),
        mx.ones((1, 1, 1, 1)),
        decay=mx.array([[[[0.5, 0.25, 1.0]]]]),
        beta_BLH=nothing,
        state=state,
    )
    same_bits(mx.array([[[[2.0, 2.0, 16.0]]]]), after)


@given(seed=st.integers(0, 2**31), cut=st.integers(1, 7))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_two_pieces_give_the_whole(*, normal: Normal, same_bits: Check, seed: int, cut: int, dtype: mx.Dtype) -> None:
    heads, rest = inputs(normal, 8, seed=seed, dtype=dtype)
    state = rest.pop("state")
    whole, last = gated_delta(*heads, **rest, state=state)
    first, between = gated_delta(*(h[:, :cut] for h in heads), **{k: v[:, :cut] for k, v in rest.items()}, state=state)
    second, after = gated_delta(*(h[:, cut:] for h in heads), **{k: v[:, cut:] for k, v in rest.items()}, state=between)
    assert (whole.dtype, last.dtype) == (dtype, mx.float32)
    same_bits(whole, mx.concatenate([first, second], axis=1))
    same_bits(last, after)


def test_no_state_is_zeros(normal: Normal, same_bits: Check) -> None:
    heads, rest = inputs(normal, 4)
    zeros = rest | {"state": mx.zeros((2, 4, 3, 5))}
    for expected, actual in zip(
        gated_delta(*heads, **zeros), gated_delta(*heads, **(rest | {"state": None})), strict=True
    ):
        same_bits(expected, actual)


def test_neighbouring_value_heads_share_a_key_head(normal: Normal, same_bits: Check) -> None:
    (q, k, v), rest = inputs(normal, 4)
    both, _ = gated_delta(q, k, v, **rest)
    for head in range(4):
        own = {"decay": rest["decay"], "beta_BLH": rest["beta_BLH"]}
        alone, _ = gated_delta(
            q[:, :, head // 2 : head // 2 + 1],
            k[:, :, head // 2 : head // 2 + 1],
            v[:, :, head : head + 1],
            **{name: value[:, :, head : head + 1] for name, value in own.items()},
            state=rest["state"][:, head : head + 1],
        )
        same_bits(both[:, :, head : head + 1], alone)


def test_one_factor_is_that_factor_in_every_column(normal: Normal, same_bits: Check) -> None:
    heads, rest = inputs(normal, 4)
    spread = rest | {"decay": mx.repeat(rest["decay"][..., None], 5, axis=-1)}
    same_bits(gated_delta(*heads, **rest)[0], gated_delta(*heads, **spread)[0])


# what goes into it


@pytest.mark.parametrize("E", [4, 48, 64])
def test_keys_have_length_one_and_queries_the_scale_of_attention(normal: Normal, ulps: Ulps, E: int) -> None:
    q, k = unit_queries_and_keys(normal(0, (2, 3, 2, E)) * 1e3, normal(1, (2, 3, 2, E)) * 1e3)
    for heads, length in ((q, E**-0.5), (k, 1.0)):
        lengths = np.sqrt((np.array(heads).astype(np.float64) ** 2).sum(axis=-1)).astype(np.float32)
        assert ulps(mx.full(lengths.shape, length, dtype=mx.float32), mx.array(lengths)) <= 4


@pytest.mark.parametrize("E", [4, 48, 64])
def test_eps_is_added_to_the_sum_of_squares_and_not_to_their_mean(ulps: Ulps, E: int) -> None:
    tiny = mx.zeros((1, 1, 1, E))
    tiny[..., 0] = 1e-3  # its square is eps, so the length is one over the root of two
    _, k = unit_queries_and_keys(tiny, tiny)
    assert ulps(mx.array([0.5**0.5]), k[0, 0, 0, :1]) <= 8


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_decay_factors_are_float32_between_nothing_and_all(normal: Normal, dtype: mx.Dtype) -> None:
    factors = decay_factors(10 * normal(0, (2, 50, 4), dtype), normal(1, (4,), dtype), normal(2, (4,), dtype))
    assert factors.dtype == mx.float32
    values = np.array(factors)
    assert (values >= 0).all()
    assert (values <= 1).all()
    assert len(np.unique(values)) > 100


def test_the_decay_factor_is_its_formula(ulps: Ulps) -> None:
    a, A_log, dt_bias = (np.array([x], dtype=np.float32) for x in (0.7, 1.4, -1.0))
    exact = np.exp(-np.exp(A_log.astype(np.float64)) * np.log1p(np.exp(a.astype(np.float64) + dt_bias)))
    assert ulps(mx.array(exact.astype(np.float32)), decay_factors(*map(mx.array, (a, A_log, dt_bias)))) <= 16


def test_the_sum_and_its_softplus_are_rounded_to_the_dtype_of_the_projection(normal: Normal, other_bits: Check) -> None:
    a, A_log, dt_bias = (normal(seed, (8,), mx.bfloat16) for seed in range(3))
    wide = decay_factors(a.astype(mx.float32), A_log, dt_bias.astype(mx.float32))
    other_bits(wide, decay_factors(a, A_log, dt_bias))


def test_sizes_that_do_not_fit_are_refused() -> None:
    good = {"key_heads": 2, "value_heads": 4, "key_width": 48, "value_width": 64, "kernel": 4}
    heads = DeltaHeads(**good)
    heads.check()
    assert (heads.keys, heads.values, heads.channels) == (96, 256, 448)
    for name, value in (("value_heads", 3), ("key_heads", 0), ("key_width", 0), ("value_width", 0), ("kernel", 1)):
        with pytest.raises(ConfigError, match=r"^the heads of the linear layers do not fit together\n"):
            DeltaHeads(**(good | {name: value})).check()


@pytest.mark.parametrize("holds", [[False, False, True, True, True], [True, True, True, False, False]])
def test_positions_without_a_token_leave_the_matrices_as_they_were(
    normal: Normal, same_bits: Check, holds: list[bool]
) -> None:
    qkv, rest = inputs(normal, 5)
    kept = slice(holds.index(True), holds.index(True) + sum(holds))
    short = {name: value if name == "state" else value[:, kept] for name, value in rest.items()}
    y, after = gated_delta(*(heads[:, kept] for heads in qkv), **short)
    masked_y, masked = gated_delta(*qkv, **rest, mask_BL=mx.array([holds, holds]))
    same_bits(y, masked_y[:, kept])
    same_bits(after, masked)
