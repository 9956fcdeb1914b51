"""Rotary positions: periods against float64 formulas, positions against each other bitwise, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.rope import (
    default_periods,
    llama3_periods,
    longrope_gain,
    longrope_periods,
    make_rope,
    yarn_gain,
    yarn_periods,
)

Check = Callable[..., None]
Normal = Callable[..., mx.array]
Doubles = npt.NDArray[np.float64]

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3_LONG = {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}
LONGROPE = {"long_factor": [1 + i / 4 for i in range(16)], "original_max_position_embeddings": 16}
ROUNDINGS = 4  # ULP that float32 rounding of the few operations of a period may add up to

widths = pytest.mark.parametrize("width", [32, 64])
bases = pytest.mark.parametrize("base", [10000.0, 500000.0, 1000000.0])


def frequencies(width: int, base: float) -> Doubles:
    """Radians a position, float64."""
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def llama3_frequencies(width: int, base: float, scaling: dict[str, Any]) -> Doubles:
    """As spec/models.md section 8 states them."""
    out = []
    for frequency in frequencies(width, base):
        wave = 2 * math.pi / frequency
        low, high, context = (
            scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        if wave > context / low:
            out.append(frequency / scaling["factor"])
        elif wave < context / high:
            out.append(frequency)
        else:
            smooth = (context / wave - low) / (high - low)
            out.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(out)


def yarn_frequencies(width: int, base: float, *, factor: float, fast: float, slow: float, context: int) -> Doubles:
    """As Peng et al. 2023 state them: interpolated and extrapolated frequencies, blended by a ramp over the pairs."""

    def pair(turns: float) -> float:
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    frequency = frequencies(width, base)
    return frequency / factor * ramp + frequency * (1 - ramp)


def as_periods(frequency: Doubles) -> npt.NDArray[np.float32]:
    return (1 / frequency).astype(np.float32)


# periods


@widths
@bases
def test_default_periods_are_the_formula_up_to_rounding(ulps: Callable[..., int], width: int, base: float) -> None:
    assert ulps(as_periods(frequencies(width, base)), default_periods(width, base=base)) <= ROUNDINGS


@widths
@bases
@pytest.mark.parametrize("scaling", [LLAMA3, LLAMA3_LONG])
def test_llama3_periods_are_the_formula_up_to_rounding(
    ulps: Callable[..., int], width: int, base: float, scaling: dict[str, Any]
) -> None:
    expected = as_periods(llama3_frequencies(width, base, scaling))
    assert ulps(expected, llama3_periods(width, base=base, scaling=scaling)) <= ROUNDINGS


def test_llama3_keeps_short_waves_slows_long_ones_and_blends_between(
    bits: Callable[..., npt.NDArray[np.uint32]],
) -> None:
    plain, bent = default_periods(64, base=500000.0), llama3_periods(64, base=500000.0, scaling=LLAMA3_LONG)
    kept, slowed = bits(plain) == bits(bent), bits(plain * 32.0) == bits(bent)
    assert kept[0]
    assert slowed[-1]
    assert not (kept | slowed).all()  # some are in the blend
    assert not (kept & slowed).any()


@widths
@bases
@pytest.mark.parametrize(("factor", "fast", "slow"), [(4.0, 32, 1), (16.0, 32, 1), (40.0, 24, 2)])
def test_yarn_periods_are_the_formula_up_to_rounding(
    *, ulps: Callable[..., int], width: int, base: float, factor: float, fast: float, slow: float
) -> None:
    scaling = {"factor": factor, "beta_fast": fast, "beta_slow": slow, "original_max_position_embeddings": 2048}
    expected = as_periods(yarn_frequencies(width, base, factor=factor, fast=fast, slow=slow, context=2048))
    assert ulps(expected, yarn_periods(width, base=base, scaling=scaling)) <= ROUNDINGS


def test_yarn_defaults_are_those_of_the_paper(same_bits: Check) -> None:
    stated = {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
    # a width this large, because few pairs would round neighbouring defaults to the same bounds
    same_bits(yarn_periods(1024, base=1e4, scaling=stated), yarn_periods(1024, base=1e4, scaling={"factor": 4.0}))


def test_a_yarn_ramp_of_no_length_is_a_step() -> None:
    scaling = {"factor": 4.0, "beta_fast": 717, "beta_slow": 717}  # both bounds are pair 0
    ratio = np.array(yarn_periods(32, base=1e4, scaling=scaling)) / np.array(default_periods(32, base=1e4))
    assert ratio.round(3).tolist() == [1.0] + [4.0] * 15


@pytest.mark.parametrize(
    ("scaling", "gain"),
    [
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0}, 0.1 * math.log(40) + 1),
        ({"factor": 40.0}, 0.1 * math.log(40) + 1),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 0.5, "mscale_all_dim": 1.0}, (0.05 * math.log(16) + 1) / (0.1 * math.log(16) + 1)),
        ({"factor": 1.0, "mscale": 3.0}, 1.0),
    ],
)
def test_the_gain_of_yarn_is_the_quotient_of_two_temperatures(
    ulps: Callable[..., int], scaling: dict[str, Any], gain: float
) -> None:
    assert ulps(np.array([gain]), np.array([yarn_gain(scaling)])) <= 1


@bases
def test_longrope_periods_are_the_factors_times_the_series_up_to_rounding(
    ulps: Callable[..., int], base: float
) -> None:
    expected = as_periods(frequencies(32, base) / np.array(LONGROPE["long_factor"]))
    assert ulps(expected, longrope_periods(32, base=base, scaling=LONGROPE)) <= ROUNDINGS


@pytest.mark.parametrize(
    ("context", "longest", "gain"),
    [
        (4096, 131072, 1.1902380714238083),  # Phi-3.5: spec/models.md section 8
        (16, 4096, math.sqrt(3)),
        (4096, 4096, 1.0),
        (4096, 2048, 1.0),
    ],
)
def test_the_gain_of_longrope_grows_with_the_logarithm_of_the_stretch(
    ulps: Callable[..., int], context: int, longest: int, gain: float
) -> None:
    found = longrope_gain({"original_max_position_embeddings": context}, max_positions=longest)
    assert ulps(np.array([gain]), np.array([found])) <= 1


# positions


ROPES = {
    "default": {},
    "traditional": {"traditional": True},
    "linear": {"scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {"scaling": {"rope_type": "llama3", **LLAMA3}},
    "yarn": {"scaling": {"type": "yarn", "factor": 4.0}},
    "longrope": {"scaling": {"type": "longrope", **LONGROPE}, "max_positions": 64},
}
every_rope = pytest.mark.parametrize("options", ROPES.values(), ids=ROPES.keys())
dtypes = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])


@every_rope
@dtypes
def test_a_rotation_at_an_offset_is_that_row_of_a_longer_one(
    normal: Normal, same_bits: Check, options: dict[str, Any], dtype: mx.Dtype
) -> None:
    rope = make_rope(32, base=10000.0, **options)
    x = normal(0, (2, 3, 20, 32), dtype)
    whole = rope(x, 5)
    for row in range(20):
        same_bits(whole[:, :, row : row + 1], rope(x[:, :, row : row + 1], 5 + row))


@given(factor=st.sampled_from([2, 4, 8, 16]), position=st.integers(0, 500))
@settings(max_examples=25, deadline=None)
def test_linear_scaling_divides_positions_by_its_factor(
    normal: Normal, same_bits: Check, factor: int, position: int
) -> None:
    x = normal(0, (1, 2, 1, 32))
    slowed = make_rope(32, base=10000.0, scaling={"rope_type": "linear", "factor": factor})
    same_bits(make_rope(32, base=10000.0)(x, position), slowed(x, factor * position))


@every_rope
@dtypes
def test_a_partial_width_leaves_the_rest_of_a_head_untouched(
    normal: Normal, same_bits: Check, other_bits: Check, options: dict[str, Any], dtype: mx.Dtype
) -> None:
    x = normal(0, (1, 2, 6, 64), dtype)
    rotated = make_rope(32, base=10000.0, **options)(x, 3)
    same_bits(x[..., 32:], rotated[..., 32:])
    other_bits(x[..., :32], rotated[..., :32])
    same_bits(make_rope(32, base=10000.0, **options)(x[..., :32], 3), rotated[..., :32])


@every_rope
def test_the_input_is_not_modified(
    normal: Normal, bits: Callable[..., npt.NDArray[np.uint32]], options: dict[str, Any]
) -> None:
    x = normal(0, (1, 2, 6, 64))
    before = bits(x).copy()
    mx.eval(make_rope(32, base=10000.0, **options)(x, 3))
    assert (bits(x) == before).all()


def test_pairs_are_halves_unless_traditional() -> None:
    x = mx.zeros((1, 1, 1, 8)).at[..., 1].add(1.0)
    halves, neighbours = (
        np.flatnonzero(np.array(make_rope(8, base=100.0, traditional=how)(x, 1))).tolist() for how in (False, True)
    )
    assert (halves, neighbours) == ([1, 5], [0, 1])


@dtypes
def test_yarn_multiplies_by_its_gain_before_rotating(normal: Normal, same_bits: Check, dtype: mx.Dtype) -> None:
    scaling = {"factor": 40.0}
    x = normal(0, (1, 2, 6, 32), dtype)
    plain = make_rope(32, base=10000.0, scaling={"type": "yarn", **scaling, "mscale": 1, "mscale_all_dim": 1})
    assert plain.gain == 1.0
    full = make_rope(32, base=10000.0, scaling={"type": "yarn", **scaling})
    same_bits(plain(x * yarn_gain(scaling), 7), full(x, 7))


@dtypes
def test_longrope_multiplies_by_its_gain_before_rotating(normal: Normal, same_bits: Check, dtype: mx.Dtype) -> None:
    scaling = {"type": "longrope", **LONGROPE}
    x = normal(0, (1, 2, 6, 32), dtype)
    plain, full = (make_rope(32, base=10000.0, scaling=scaling, max_positions=longest) for longest in (16, 64))
    assert plain.gain == 1.0
    same_bits(plain(x * math.sqrt(1.5), 7), full(x, 7))


def test_longrope_never_uses_its_short_factors(normal: Normal, same_bits: Check) -> None:
    x = normal(0, (1, 2, 6, 32))
    without, beside = (
        make_rope(32, base=10000.0, scaling={"type": "longrope", **LONGROPE, **more}, max_positions=64)
        for more in ({}, {"short_factor": [9.0] * 16})
    )
    same_bits(without(x, 0), beside(x, 0))


def test_another_base_is_another_rotation(normal: Normal, other_bits: Check) -> None:
    x = normal(0, (1, 2, 6, 32))
    other_bits(make_rope(32, base=10000.0)(x, 1), make_rope(32, base=10001.0)(x, 1))


# scaling entries


@pytest.mark.parametrize("scaling", [None, {}, {"type": "default"}, {"rope_type": "default"}])
def test_no_scaling_is_the_default_form(normal: Normal, same_bits: Check, scaling: dict[str, Any] | None) -> None:
    x = normal(0, (1, 2, 6, 32))
    same_bits(make_rope(32, base=10000.0)(x, 3), make_rope(32, base=10000.0, scaling=scaling)(x, 3))


@pytest.mark.parametrize(
    "names", [{"type": "linear"}, {"rope_type": "linear"}, {"type": "linear", "rope_type": "linear"}]
)
def test_the_form_may_be_called_type_or_rope_type(names: dict[str, str]) -> None:
    assert make_rope(32, base=10000.0, scaling={"factor": 4.0, **names}).scale == 0.25


def test_a_scaling_entry_is_left_as_it_was() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    make_rope(32, base=10000.0, scaling=scaling)
    assert scaling == {"type": "linear", "factor": 4.0}


def test_two_forms_that_contradict_each_other_are_both_named() -> None:
    with pytest.raises(ConfigError) as caught:
        make_rope(32, base=10000.0, scaling={"type": "linear", "rope_type": "yarn", "factor": 4.0})
    assert str(caught.value) == (
        "the two forms of rope scaling contradict each other\n"
        "  rope type  yarn\n"
        "  type       linear\n"
        "  next       mend rope_scaling in config.json"
    )


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_rope(32, base=10000.0, scaling={"rope_type": "dynamic", "factor": 4.0})
    assert str(caught.value) == (
        "rope scaling 'dynamic' is unknown\n"
        "  known  default, linear, llama3, yarn, longrope, proportional\n"
        "  next   use a snapshot whose rope_scaling is one of these"
    )


@pytest.mark.parametrize(
    ("scaling", "missing", "unknown"),
    [
        ({"type": "linear"}, "factor", "nothing"),
        ({"type": "yarn"}, "factor", "nothing"),
        ({"type": "llama3", "factor": 8.0}, ", ".join(sorted(LLAMA3.keys() - {"factor"})), "nothing"),
        ({"type": "linear", "factor": 4.0, "beta_fast": 32}, "nothing", "beta_fast"),
        ({"type": "llama3", **LLAMA3, "z": 1, "a": 1}, "nothing", "a, z"),
        ({"type": "default", "low_freq_factor": 1.0}, "nothing", "low_freq_factor"),
        ({"low_freq_factor": 1.0}, "nothing", "low_freq_factor"),
    ],
)
def test_a_form_without_a_key_or_with_one_too_many_is_refused(
    scaling: dict[str, Any], missing: str, unknown: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rope(32, base=10000.0, scaling=scaling)
    assert str(caught.value) == (
        f"rope scaling {scaling.get('type', 'default')!r} is not as expected\n"
        f"  missing  {missing}\n"
        f"  unknown  {unknown}\n"
        "  next     mend rope_scaling in config.json"
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": "4"},
        {"type": "linear", "factor": 0},
        {"type": "yarn", "factor": 4.0, "beta_fast": None},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
        {"type": "llama3", **LLAMA3, "high_freq_factor": "4"},
        {"type": ["linear"], "factor": 4.0},
        {"type": "longrope", **LONGROPE, "long_factor": 2.0},
        {"type": "longrope", **LONGROPE, "long_factor": [1.0] * 15 + [0]},
        {"type": "longrope", **LONGROPE, "short_factor": [1.0] * 15 + ["1"]},
        {"type": "longrope", **LONGROPE, "original_max_position_embeddings": [16]},
    ],
)
def test_a_value_that_is_no_positive_number_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_rope(32, base=10000.0, scaling=scaling)


@pytest.mark.parametrize(
    ("changes", "given", "facts"),
    [
        ({"long_factor": [1.0] * 15}, {"max_positions": 64}, ("15", False, "64", "16")),
        ({}, {}, (None, False, "None", "16")),
        ({}, {"max_positions": 64, "traditional": True}, (None, True, "64", "16")),
        ({"original_max_position_embeddings": 1}, {"max_positions": 64}, (None, False, "64", "1")),
    ],
)
def test_a_longrope_that_does_not_fit_the_model_is_refused(
    changes: dict[str, Any], given: dict[str, Any], facts: tuple[str | None, bool, str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rope(32, base=10000.0, scaling={"type": "longrope", **LONGROPE, **changes}, **given)
    factors, traditional, longest, context = facts
    assert str(caught.value) == (
        "rope scaling 'longrope' does not fit the model\n"
        + (f"  long factor                       {factors}\n" if factors else "")
        + "  pairs                             16\n"
        f"  traditional                       {traditional}\n"
        f"  max position embeddings           {longest}\n"
        f"  original max position embeddings  {context}\n"
        "  expected                          a factor a pair, pairs of halves, max_position_embeddings, and an original "
        "context above 1\n"
        "  next                              mend rope_scaling in config.json"
    )


def test_a_stated_attention_factor_must_be_the_computed_one() -> None:
    scaling = {"type": "yarn", "factor": 8.0}
    stated = make_rope(32, base=10000.0, scaling={**scaling, "attention_factor": 1.2079441541679836})
    assert stated.gain == make_rope(32, base=10000.0, scaling=scaling).gain
    with pytest.raises(ConfigError) as caught:
        make_rope(32, base=10000.0, scaling={**scaling, "attention_factor": 1.2})
    assert str(caught.value) == (
        "rope scaling 'yarn' states an attention factor that its other keys do not give\n"
        "  attention factor  1.2\n"
        "  computed          1.2079441541679836\n"
        "  next              mend rope_scaling in config.json"
    )
