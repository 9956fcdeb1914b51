"""Curves against the float64 numbers of spec/samplers.md section 2, and the properties that they promise."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.sampling import curves
from engine.sampling.curves import Shaper, ToneCurve, TransferCurve

Doubles = npt.NDArray[np.float64]
P = np.log([0.6, 0.25, 0.1, 0.04, 0.009, 0.001])
HALVES = np.log([0.5, 0.25, 0.125, 0.0625, 0.0625])
POINTS = ((0.0001, 0.00001), (1, 0.5), (20, 30), (100, 100))


def shares(logits: Doubles) -> list[float]:
    e = np.exp(logits - logits.max())
    rounded: list[float] = (e / e.sum()).round(6).tolist()
    return rounded


def test_a_transfer_curve_has_the_worked_knots_and_values() -> None:
    curve = TransferCurve(points=POINTS)
    x, y = curve.knots

    assert x.round(6).tolist() == [-13.815511, -4.60517, -1.609438, 0]
    assert y.round(6).tolist() == [-16.118096, -5.298317, -1.203973, 0]
    assert curve.tangents.round(6).tolist() == [1.174743, 1.279891, 0.939335, 0.74807]
    assert curve(HALVES).round(6).tolist() == [-0.486016, -1.005381, -1.708949, -2.631641, -2.631641]
    assert shares(curve(HALVES)) == [0.470975, 0.280182, 0.138639, 0.055102, 0.055102]
    assert curve(np.log([1e-8])).round(6).tolist() == [-21.527985]


def test_the_curve_of_equal_knots_is_temperature_one() -> None:
    curve = TransferCurve(points=((0.0001, 0.0001), (100, 100)))
    lp = np.linspace(-40, 0, 200)
    assert np.abs(curve(lp) - lp).max() < 1e-12


def test_a_token_that_is_ruled_out_stays_so() -> None:
    lp = np.array([-np.inf, -1.0, -0.5])
    assert [c(lp)[0] for c in (TransferCurve(points=POINTS), ToneCurve())] == [-np.inf, -np.inf]


@given(
    points=st.lists(st.tuples(st.floats(1e-4, 100), st.floats(1e-4, 100)), min_size=2, max_size=6),
    lp=st.lists(st.floats(-20, 0), min_size=2, max_size=20, unique=True),
)
@settings(max_examples=80, deadline=None)
def test_knots_that_rise_keep_the_order_of_tokens(points: list[tuple[float, float]], lp: list[float]) -> None:
    x, y = (sorted(values) for values in zip(*points, strict=True))
    if min(np.diff(x)) < 1e-3:
        return
    curve = TransferCurve(points=tuple(zip(x, y, strict=True)))
    out = curve(np.sort(lp))
    assert curve.rises
    assert (np.diff(out) >= -1e-9 * np.abs(out).max()).all()


def test_knots_that_fall_are_known_to() -> None:
    assert not TransferCurve(points=((1, 50), (100, 10))).rises


@pytest.mark.parametrize("points", [(), ((1, 1),), ((1, 1), (1, 2))])
def test_points_that_make_no_curve_are_refused(points: Any) -> None:
    with pytest.raises(RequestError, match="these points make no curve"):
        TransferCurve(points=points)


@pytest.mark.parametrize(
    ("options", "logits", "p_out"),
    [
        (
            {},
            [7.027326, 6.238723, 5.253751, 4.114937, 2.250369, -0.496162],
            [0.592588, 0.269319, 0.100577, 0.032205, 0.004991, 0.00032],
        ),
        (
            {"offset": 0},
            [0, -1.094336, -2.239699, -3.385063, -5.245567, -7.5208],
            [0.675247, 0.226047, 0.071907, 0.022874, 0.003559, 0.000366],
        ),
        (
            {"offset": 0, "pivot": "entropy"},
            [0.688199, -0.406137, -1.5515, -2.696863, -4.561432, -7.012187],
            [0.675297, 0.226064, 0.071913, 0.022876, 0.003545, 0.000306],
        ),
        (
            {"offset": 2, "width": 1, "shoulder": 1, "toe": 1},
            [2.116434, 1.396708, 0.260301, -0.885063, -2.235404, -3.101133],
            [0.584393, 0.284532, 0.091326, 0.029052, 0.007529, 0.003168],
        ),
    ],
)
def test_the_tone_curve_gives_the_worked_numbers(
    options: dict[str, Any], logits: list[float], p_out: list[float]
) -> None:
    out = ToneCurve(gain=1.25, **options)(P)
    assert out.round(6).tolist() == logits
    assert shares(out) == p_out


@pytest.mark.parametrize("off", [{"shoulder": 0.0, "toe": 0.0}, {"width": float("inf")}])
def test_without_ends_the_tone_curve_is_a_temperature_bit_for_bit(off: dict[str, Any]) -> None:
    assert (ToneCurve(gain=1.25, **off)(P).view(np.uint64) == (1.25 * P).view(np.uint64)).all()


@given(
    lp=st.lists(st.floats(-40, 0), min_size=2, max_size=30),
    pivot=st.sampled_from(["top", "entropy", "median"]),
    offset=st.floats(-3, 9),
    width=st.floats(0, 6),
)
@settings(max_examples=80, deadline=None)
def test_the_tone_curve_keeps_the_order_of_tokens(lp: list[float], pivot: Any, offset: float, width: float) -> None:
    row = np.sort(lp) - np.log(np.exp(lp).sum())
    out = ToneCurve(gain=1.25, pivot=pivot, offset=offset, width=width)(row)
    assert (np.diff(out) >= -1e-9).all()


def test_the_median_pivot_is_where_half_the_mass_is_reached() -> None:
    assert np.exp(curves.pivot_of(np.log([[0.2, 0.45, 0.35]]), "median")).round(9).tolist() == [[0.35]]


def test_the_transfer_functions_give_the_worked_numbers() -> None:
    assert np.exp(curves.oetf(P)).round(6).tolist() == [1, 0.837248, 0.65641, 0.447214, 0.212132, 0.070711]
    assert shares(curves.oetf(P)) == [0.310201, 0.259715, 0.203619, 0.138726, 0.065804, 0.021935]
    assert shares(curves.eotf(P)) == [0.964531, 0.031569, 0.003501, 0.000388, 0.000011, 0.0]
    assert curves.pipeline(P).round(6).tolist() == [5, 4.040126, 3.017034, 1.903654, 0.777853, 0.208138]
    assert shares(curves.pipeline(P)) == [0.629414, 0.241029, 0.086645, 0.028458, 0.009232, 0.005222]


def test_the_exponent_of_a_display_is_the_published_one() -> None:
    assert [round(curves.system_gamma(peak), 6) for peak in (400, 1000, 1200, 2000)] == [
        1.032865,
        1.2,
        1.233256,
        1.326433,
    ]


def test_the_shaper_has_the_worked_constants_and_values() -> None:
    shaper = Shaper()

    assert round(shaper.bend, 6) == 0.612245
    assert round(shaper.foot_slope, 6) == 1.128571
    assert [round(c, 6) for c in shaper.toe] == [-16.785714, 7.857143]
    assert round(float(shaper.curve(np.array(1.0))), 6) == 0.724649
    assert round(shaper.output_scale, 6) == 47.655504
    assert shaper(P).round(6).tolist() == [47.655504, 44.926224, 41.794477, 38.318506, 31.680845, 19.094579]


def test_the_shaper_is_smooth_where_its_parts_meet() -> None:
    shaper, step = Shaper(), 1e-7
    for x in (0.2, 0.55):
        left, here, right = (float(shaper.curve(np.array(x + d))) for d in (-step, 0, step))
        assert abs((right - here) - (here - left)) < 1e-5 * step * 100


def test_a_scale_of_ones_own_replaces_the_gaps() -> None:
    assert Shaper(scale=2.0)(P)[0] == 2.0
