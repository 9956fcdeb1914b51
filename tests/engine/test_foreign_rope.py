"""Rotations recorded by another project on an Apple GPU (tests/fixtures/mlx-bun, MIT, see its LICENSE).

These describe agreement across platforms and mlx versions, where bits are not promised; hence ULP bounds, which no verdict
of the gate knows. Both come from what is computed, and the oracle itself, run on the CPU, shows the same distances:

- Periods: two powers that round differently, then the blend, whose `1 - smooth` cancels: measured 5 float32 ULP in one
  entry of llama3, 2 in yarn.
- Outputs: the CPU rounds cosine, sine, two products and their sum to bfloat16, the GPU rounds once at the end. Each of the
  roundings is half a ULP of the pair's length at most (not of a small result of cancellation), six of them make 3; measured
  1, and 1.25 in one of the twelve outputs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.rope import make_rope

PERIOD_ULPS = {"llama3": 5, "yarn": 2, "yarn-noscale": 2}
OUTPUT_ULPS = 2
FOLDER = Path(__file__).parents[1] / "fixtures" / "mlx-bun" / "universal-rope"
CASES = {
    case["name"]: case
    for case in json.loads((FOLDER / "manifest.json").read_text())["cases"]
    if case["name"] in {"default", "linear", "llama3", "yarn", "yarn-noscale", "traditional-partial"}
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def stored(name: str, shape: list[int]) -> mx.array:
    return mx.array(np.fromfile(FOLDER / f"{name}.bin", dtype="<f4").reshape(shape))


def rope_of(case: dict[str, Any]) -> Any:
    return make_rope(
        case["dims"], base=case["base"], traditional=case.get("traditional", False), scaling=case["scaling_config"]
    )


def test_no_case_is_left_out_unnoticed() -> None:
    assert len(CASES) == 6
    assert {case["name"] for case in CASES.values() if case["has_freqs"]} == {"llama3", "yarn", "yarn-noscale"}


@every_case
def test_periods_are_within_the_stated_ulps(ulps: Callable[..., int], case: dict[str, Any]) -> None:
    periods = rope_of(case).periods
    assert (periods is not None) == case["has_freqs"]
    if periods is not None:
        assert ulps(stored(f"{case['name']}-freqs", [case["dims"] // 2]), periods) <= PERIOD_ULPS[case["name"]]


@every_case
def test_the_gain_is_the_recorded_one(ulps: Callable[..., int], case: dict[str, Any]) -> None:
    assert ulps(np.array([case.get("mscale", 1.0)]), np.array([rope_of(case).gain])) == 0


@every_case
@pytest.mark.parametrize("offset", [0, 5])
def test_outputs_are_within_the_stated_ulps_of_their_pair(case: dict[str, Any], offset: int) -> None:
    x = stored(f"{case['name']}-input", case["shape"]).astype(mx.bfloat16)
    actual = np.array(rope_of(case)(x, offset).astype(mx.float32)).astype(np.float64)
    expected = np.array(stored(f"{case['name']}-out{offset}", case["shape"])).astype(np.float64)
    width = case["dims"]
    if case.get("traditional"):
        pairs = expected[..., :width].reshape(*expected.shape[:-1], width // 2, 2)
        length = np.repeat(np.hypot(pairs[..., 0], pairs[..., 1]), 2, axis=-1)
    else:
        length = np.tile(np.hypot(expected[..., : width // 2], expected[..., width // 2 : width]), 2)
    ulp = 2.0 ** (np.floor(np.log2(length)) - 7)
    assert (np.abs(expected - actual)[..., :width] <= OUTPUT_ULPS * ulp).all()
    assert (expected[..., width:] == actual[..., width:]).all()


@every_case
def test_most_outputs_are_bit_equal(case: dict[str, Any]) -> None:
    x = stored(f"{case['name']}-input", case["shape"]).astype(mx.bfloat16)
    same = total = 0
    for offset in case["offsets"]:
        actual = np.array(rope_of(case)(x, offset).view(mx.uint16))
        expected = np.array(stored(f"{case['name']}-out{offset}", case["shape"]).astype(mx.bfloat16).view(mx.uint16))
        same, total = same + int((expected == actual).sum()), total + actual.size
    assert same / total >= 0.75  # measured 0.78 to 0.88; half as much again on the base gives 0.35 to 0.68
