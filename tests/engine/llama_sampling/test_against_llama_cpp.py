"""Our samplers against llama.cpp's own, as its oracle recorded them (tests/fixtures/llama_cpp).

Bounds: survivors, their order, their logits and all drawn ids are equal, logits to the bit. Probabilities are within the
spec's 1e-5 and at most 2 ULP apart, since exp comes from different libraries. On rows with ties the order among equal logits
is that of llama.cpp's C++ library: there the drawn ids' logits must be equal, draw by draw.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.context import Context
from engine.llama_sampling.generators import Mt19937
from engine.llama_sampling.pair_table import PREFIX, draws_of
from engine.llama_sampling.strategy_table import PICKS, SAMPLERS, strategy_of

RECORDED = Path(__file__).parents[2] / "fixtures" / "llama_cpp"
CASES: dict[str, dict[str, Any]] = json.loads((RECORDED / "samplers.json").read_text())
ROWS = load_file(RECORDED / "rows.safetensors")
LONG = load_file(RECORDED / "long_draws.safetensors")
TIED = ("ties", "flat", "even")
SHORT = {name: case for name, case in CASES.items() if not name.startswith(PREFIX)}
BOUND, ULPS = 1e-5, 2
EARLY = 200  # draws of the long cases that are repeated here; the pair table repeats all


def floats(values: list[float | None]) -> npt.NDArray[np.float32]:
    return np.array([-np.inf if value is None else value for value in values], dtype=np.float32)


def digest(ids: npt.NDArray[np.int32]) -> str:
    return hashlib.sha256(np.sort(ids).astype("<i4").tobytes()).hexdigest()


def ulps(expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32]) -> int:
    """Distance of non-negative floats in units of the last place."""
    return int(np.abs(expected.view(np.int32).astype(np.int64) - actual.view(np.int32)).max(initial=0))


def first_step(case: dict[str, Any]) -> tuple[Candidates, Candidates]:
    strategy, row = strategy_of(case["chain"], case["pick"]), ROWS[case["row"]]
    candidates = Candidates.from_logits(row)
    context = Context(
        history=case["history"], vocabulary=len(row), prng=Mt19937(case["seed"]), xtc_prng=Mt19937(case["seed"])
    )
    for sampler in strategy.samplers:
        candidates = sampler.apply(candidates, context)
    return candidates, strategy.pick.pick(candidates, context).candidates


def check_candidates(recorded: dict[str, Any], actual: Candidates, *, tied: bool) -> int:
    """Compare survivors; gives how many leading ones are possible, and so in an order that the sort defines."""
    assert len(actual) == recorded["count"]
    leading = recorded["leading"]
    possible = int(np.isfinite(actual.logits[: len(leading)]).sum())
    if not tied:
        assert digest(actual.ids) == recorded["sha256_of_sorted"]
        if not np.isneginf(actual.logits[:possible]).any():  # masked ones sorted to the end: ties of no mass
            assert actual.ids[:possible].tolist() == leading[:possible]
        else:
            assert actual.ids[: len(leading)].tolist() == leading
    return possible


def check_probs(recorded: list[float | None], actual: Candidates) -> None:
    expected = floats(recorded)
    assert actual.probs is not None
    leading = actual.probs[: len(expected)]
    assert np.abs(expected.astype(np.float64) - leading).max() <= BOUND
    assert ulps(expected, leading) <= ULPS


@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT)
def test_survivors_logits_and_probabilities_are_llama_cpps(case: dict[str, Any]) -> None:
    before, after = first_step(case)
    tied = case["row"] in TIED
    check_candidates(case["ids"], before, tied=tied)
    expected = floats(case["logits"])
    assert before.logits[: len(expected)].tobytes() == expected.tobytes()
    if before.probs is not None and not tied:
        check_probs(case["left_probs"], before)
    if case["probs"] is not None:
        check_candidates(case["picked_from"], after, tied=tied)
        check_probs(case["probs"], after)


@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT)
def test_ids_are_equal_for_equal_draws(case: dict[str, Any]) -> None:
    row = ROWS[case["row"]]
    actual = draws_of(case, row, len(case["draws"]), (Mt19937(case["seed"]), Mt19937(case["seed"])))
    if case["row"] in TIED:
        assert row[actual].tolist() == row[case["draws"]].tolist()
    else:
        assert actual.tolist() == case["draws"]


@pytest.mark.parametrize("name", LONG)
def test_long_runs_begin_with_equal_ids(name: str) -> None:
    case = CASES[name]
    actual = draws_of(case, ROWS[case["row"]], EARLY, (Mt19937(case["seed"]), Mt19937(case["seed"])))
    assert actual.tolist() == LONG[name][:EARLY].tolist()


def test_the_recording_covers_every_sampler_on_real_and_adversarial_rows() -> None:
    assert len(SHORT) >= 60
    assert {table["name"] for case in SHORT.values() for table in case["chain"]} == set(SAMPLERS)
    assert {case["pick"]["name"] for case in SHORT.values()} == set(PICKS)
    assert {case["row"] for case in SHORT.values()} == set(ROWS)
    assert set(LONG) == {name for name in CASES if name.startswith(PREFIX)}


def test_rows_that_are_not_called_tied_have_no_ties_that_a_draw_can_meet() -> None:
    for name, row in ROWS.items():
        possible = row[np.isfinite(row)]
        if name not in (*TIED, "peaked", "real"):  # the last two tie only where the mass is below 1e-9
            assert len(np.unique(possible)) == len(possible), name


def test_a_shifted_probability_and_a_swapped_id_are_noticed() -> None:
    probs = np.array([0.25, 0.5], dtype=np.float32)
    assert (
        ulps(probs, np.nextafter(np.nextafter(np.nextafter(probs, np.float32(1)), np.float32(1)), np.float32(1))) == 3
    )
    assert digest(np.array([1, 2], np.int32)) != digest(np.array([1, 3], np.int32))
