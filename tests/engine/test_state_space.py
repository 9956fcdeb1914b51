"""The scan against its recurrence, its seams, and what each position may depend on."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import state_space
from engine.errors import ConfigError
from engine.state_space import PIECE, read_limits, scan, time_steps

Check = Callable[..., None]
Inputs = dict[str, mx.array]
H, E, G, N = 4, 3, 2, 5


def inputs(seed: int, L: int, *, B: int = 1, dtype: mx.Dtype = mx.float32) -> Inputs:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape, dtype=np.float32)).astype(dtype)

    return {
        "x_BLHE": normal(B, L, H, E),
        "write_BLGN": normal(B, L, G, N),
        "read_BLGN": normal(B, L, G, N),
        "steps_BLH": time_steps(normal(B, L, H), normal(H), (0.0, math.inf)),
        "A_log_H": normal(H),
        "D_H": normal(H),
    }


def scanned(given: Inputs, state: mx.array | None = None, at: slice = slice(None)) -> tuple[mx.array, mx.array]:
    """A scan of some of the positions."""
    cut = {name: array[:, at] if "L" in name.split("_")[-1] else array for name, array in given.items()}
    values = {name: cut.pop(name) for name in ("x_BLHE", "write_BLGN", "read_BLGN", "steps_BLH")}
    return scan(*values.values(), A_log_H=cut["A_log_H"], D_H=cut["D_H"], state_BHEN=state)


def recurrence(given: Inputs, state: mx.array | None) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Position by position in float64: decay, take in, read."""
    wide = {name: np.array(array.astype(mx.float32), dtype=np.float64) for name, array in given.items()}
    x, steps = wide["x_BLHE"], wide["steps_BLH"]
    write, read = (np.repeat(wide[name], H // G, axis=2) for name in ("write_BLGN", "read_BLGN"))
    matrices = np.zeros((x.shape[0], H, E, N)) if state is None else np.array(state, dtype=np.float64)
    rows = []
    for i in range(x.shape[1]):
        decay = np.exp(-np.exp(wide["A_log_H"]) * steps[:, i])
        taken = (steps[:, i, :, None] * x[:, i])[..., None] * write[:, i, :, None]
        matrices = decay[..., None, None] * matrices + taken
        rows.append((matrices @ read[:, i, :, :, None])[..., 0] + wide["D_H"][:, None] * x[:, i])
    return np.stack(rows, axis=1), matrices


def far_off(expected: npt.NDArray[np.float64], actual: mx.array) -> float:
    return float(np.abs(expected - np.array(actual, dtype=np.float64)).max() / max(1.0, np.abs(expected).max()))


@given(seed=st.integers(0, 2**32 - 1), L=st.integers(1, 12), B=st.integers(1, 3), continued=st.booleans())
@settings(max_examples=50, deadline=None)
def test_it_is_the_recurrence_but_for_rounding(*, seed: int, L: int, B: int, continued: bool) -> None:
    given = inputs(seed, L, B=B)
    state = mx.random.normal((B, H, E, N), key=mx.random.key(seed)) if continued else None
    y, matrices = scanned(given, state)
    expected_y, expected_matrices = recurrence(given, state)
    assert far_off(expected_y, y) < 1e-5
    assert far_off(expected_matrices, matrices) < 1e-5


@pytest.mark.parametrize(
    "fault",
    [
        {"A_log_H": 1.0},
        {"D_H": 1.0},
        {"steps_BLH": 0.01},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_the_comparison_with_the_recurrence_sees_every_operand(fault: dict[str, float]) -> None:
    given = inputs(0, 7)
    wrong = {name: array + fault.get(name, 0.0) for name, array in given.items()}
    assert far_off(recurrence(wrong, None)[0], scanned(given)[0]) > 1e-4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_cut_at_a_piece_is_no_cut(same_bits: Check, dtype: mx.Dtype) -> None:
    given = inputs(1, PIECE + 9, dtype=dtype)
    whole, matrices = scanned(given)
    first, between = scanned(given, at=slice(PIECE))
    second, after = scanned(given, between, slice(PIECE, None))
    same_bits(whole, mx.concatenate([first, second], axis=1))
    same_bits(matrices, after)


def test_a_cut_elsewhere_rounds_otherwise(other_bits: Check) -> None:
    given = inputs(1, 40)
    whole, _ = scanned(given)
    first, between = scanned(given, at=slice(7))
    second, _ = scanned(given, between, slice(7, None))
    other_bits(whole, mx.concatenate([first, second], axis=1))


def test_a_piece_of_another_length_would_be_seen(monkeypatch: pytest.MonkeyPatch, other_bits: Check) -> None:
    given = inputs(1, 300)
    right, _ = scanned(given)
    monkeypatch.setattr(state_space, "PIECE", 128)
    other_bits(right, scanned(given)[0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_position_depends_on_nothing_after(same_bits: Check, other_bits: Check, dtype: mx.Dtype) -> None:
    given = inputs(2, 12, dtype=dtype)
    changed = {**given, "x_BLHE": mx.concatenate([given["x_BLHE"][:, :8], 2 * given["x_BLHE"][:, 8:]], axis=1)}
    one, two = scanned(given)[0], scanned(changed)[0]
    same_bits(one[:, :8], two[:, :8])
    other_bits(one[:, 8:], two[:, 8:])


def test_a_sequence_does_not_depend_on_its_neighbour(same_bits: Check) -> None:
    both = inputs(3, 20, B=2)
    alone = {name: array[:1] if array.ndim > 1 else array for name, array in both.items()}
    for one, two in zip(scanned(alone), scanned(both), strict=True):
        same_bits(one, two[:1])


def test_matrices_stay_float32_whatever_is_computed_in() -> None:
    y, matrices = scanned(inputs(4, 3, dtype=mx.bfloat16))
    assert (y.dtype, matrices.dtype) == (mx.bfloat16, mx.float32)


def test_no_matrices_are_zero_matrices(same_bits: Check) -> None:
    given = inputs(5, 6)
    for one, two in zip(scanned(given), scanned(given, mx.zeros((1, H, E, N))), strict=True):
        same_bits(one, two)


def test_no_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^a scan needs at least one position$"):
        scanned(inputs(6, 4), at=slice(0))


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    low=st.sampled_from([0.0, 0.2]),
    high=st.sampled_from([0.5, math.inf]),
)
@settings(max_examples=30, deadline=None)
def test_steps_are_the_softplus_of_the_widened_sum_within_bounds(
    seed: int, dtype: mx.Dtype, low: float, high: float
) -> None:
    random = np.random.default_rng(seed)
    dt, bias = (mx.array(random.standard_normal(shape, dtype=np.float32)).astype(dtype) for shape in ((2, 3, 4), (4,)))
    steps = time_steps(dt, bias, (low, high))
    assert steps.dtype == mx.float32
    raw = np.log1p(np.exp(np.array(dt.astype(mx.float32)) + np.array(bias.astype(mx.float32))))
    assert np.abs(np.array(steps) - np.clip(raw, low, high)).max() < 1e-6


def test_two_bounds_are_a_pair() -> None:
    assert read_limits((0.0, math.inf)) == (0.0, math.inf)


@pytest.mark.parametrize("bounds", [[], [0.1], [0.1, 0.2, 0.3], [0.3, 0.2], [math.nan, 1.0]])
def test_other_bounds_are_refused(bounds: list[Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_limits(bounds)
    assert str(caught.value) == (
        "time_step_limit is not a lower and an upper bound\n"
        f"  time step limit  {bounds}\n"
        "  next             mend config.json"
    )


@pytest.mark.parametrize(("side", "length"), [("left", 3), ("left", 200), ("right", 3), ("right", PIECE + 40)])
def test_positions_without_a_token_leave_the_matrices_as_they_were(
    normal: Callable[..., mx.array], same_bits: Check, side: str, length: int
) -> None:
    pad = 5

    def padded(array: mx.array) -> mx.array:
        junk = mx.full((1, pad, *array.shape[2:]), 3.0)
        return mx.concatenate([junk, array] if side == "left" else [array, junk], axis=1)

    x, write, read = normal(0, (1, length, H, E)), normal(1, (1, length, G, N)), normal(2, (1, length, G, N))
    steps = mx.abs(normal(3, (1, length, H)))
    fixed: Any = {"A_log_H": normal(5, (H,)), "D_H": normal(6, (H,)), "state_BHEN": normal(4, (1, H, E, N))}
    y, after = scan(x, write, read, steps, **fixed)
    column = mx.arange(length + pad)[None]
    masked_y, masked = scan(
        *(padded(array) for array in (x, write, read, steps)),
        **fixed,
        mask_BL=column >= pad if side == "left" else column < length,
        ends=None if side == "left" else (length,),
    )
    same_bits(y, masked_y[:, pad:] if side == "left" else masked_y[:, :length])
    same_bits(after, masked)
