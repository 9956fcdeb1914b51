"""Vectors that llama.cpp publishes with its own tests (tests/test-sampling.cpp, MIT licence), to its 1e-5 on probabilities.

Logits are logs of the given probabilities; results are probabilities of the survivors, in descending order where a sampler
leaves the order open. Source: spec/samplers.md sections 3.2 and 3.3.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.llama_sampling.context import Sampler
from engine.llama_sampling.dry import DRY
from engine.llama_sampling.filters import MinP, TopK, TopNSigma, TopP, TypicalP
from engine.llama_sampling.penalties import Penalties
from engine.llama_sampling.temperature import DynamicTemperature, Temperature
from engine.llama_sampling.xtc import XTC

BOUND = 1e-5
RISING = (0.1, 0.2, 0.3, 0.4)
THREE = (0.44444, 0.33333, 0.22222)
WHOLE = (0.4, 0.3, 0.2, 0.1)


def near(expected: Sequence[float]) -> Any:
    return pytest.approx(list(expected), abs=BOUND)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (TopK(1), (1,)),
        (TopK(3), THREE),
        (TopK(4), WHOLE),
        (TopK(0), WHOLE),
        (TopP(0), (1,)),
        (TopP(0.7), (0.571429, 0.428571)),
        (TopP(0.8), THREE),
        (TopP(1), WHOLE),
        (MinP(0), WHOLE),
        (MinP(0.24), WHOLE),
        (MinP(0.26), (0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9)),
        (MinP(0.49), (0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9)),
        (MinP(0.51), (0.4 / 0.7, 0.3 / 0.7)),
        (MinP(0.74), (0.4 / 0.7, 0.3 / 0.7)),
        (MinP(0.76), (1,)),
        (MinP(1.0), (1,)),
        (MinP(1.05), (1,)),
        (TopNSigma(1), (0.571429, 0.428571, 0, 0)),
        (TopNSigma(0), WHOLE),
        (TopNSigma(3), WHOLE),
        (Temperature(1), WHOLE),
        (Temperature(0), (1, 0, 0, 0)),
        (DynamicTemperature(1, 0, 1), WHOLE),
        (DynamicTemperature(0, 0, 1), (1, 0, 0, 0)),
    ],
    ids=repr,
)
def test_filters_and_temperatures_on_rising_probabilities(
    bench: Any, sampler: Sampler, expected: Sequence[float]
) -> None:
    assert bench.descending(sampler, RISING) == near(expected)


@pytest.mark.parametrize(
    ("probs", "expected"),
    [((0.97, 0.01, 0.01, 0.01), (0.97 / 0.97,)), ((0.4, 0.2, 0.2, 0.2), (1 / 3, 1 / 3, 1 / 3))],
)
def test_typical_keeps_what_is_nearest_to_the_entropy(
    bench: Any, probs: Sequence[float], expected: Sequence[float]
) -> None:
    assert bench.descending(TypicalP(0.5), probs) == near(expected)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.09, (1,)), (0.19, (2 / 3, 1 / 3)), (0.29, (0.5, 1 / 3, 1 / 6)), (0.39, WHOLE)],
)
def test_xtc_drops_all_but_the_last_above_the_threshold(
    bench: Any, threshold: float, expected: Sequence[float]
) -> None:
    assert bench.descending(XTC(0.99, threshold), WHOLE, seed=0) == near(expected)


@pytest.mark.parametrize(
    ("options", "history", "expected"),
    [
        ({"repeat": 50}, [0], (0, 0.25, 0.25, 0.25, 0.25)),
        ({"repeat": 50}, [0, 1, 2], (0, 0, 0, 0.5, 0.5)),
        ({"repeat": 50}, [0, 1, 2, 0, 0], (0, 0, 0, 0.5, 0.5)),
        ({"frequency": 5, "presence": 5}, [0], (0.000011, 0.249997, 0.249997, 0.249997, 0.249997)),
        ({"frequency": 5, "presence": 5}, [0, 1, 2], (0.000023, 0.000023, 0.000023, 0.499966, 0.499966)),
        ({"frequency": 5, "presence": 5}, [0, 1, 2, 0, 0], (0, 0.000023, 0.000023, 0.499977, 0.499977)),
    ],
)
def test_penalties_on_equal_probabilities(
    bench: Any, options: dict[str, float], history: list[int], expected: Sequence[float]
) -> None:
    penalties = Penalties(last_n=len(history), **options)  # type: ignore[arg-type]
    assert bench.probs(bench.apply(penalties, bench.of_probs([0.2] * 5), history)) == near(expected)


@pytest.mark.parametrize(
    ("vocabulary", "history", "options", "expected"),
    [
        (4, [0, 1], {}, [0.25] * 4),
        (4, [0, 1, 2, 0, 1], {"base": 1.1, "last_n": 5}, [0.296923, 0.296923, 0.109232, 0.296923]),
        (
            5,
            [0, 1, 2, 0, 1],
            {"multiplier": 2, "base": 1.1, "last_n": 5},
            [0.241818, 0.241818, 0.032727, 0.241818, 0.241818],
        ),
        (5, [0, 1, 3, 4, 0, 1], {"base": 1.1, "last_n": 6, "breakers": ((3,),)}, [0.2] * 5),
        (5, [0, 1, 2, 3, 4, 0, 1], {"base": 1.1, "allowed_length": 4, "last_n": 7}, [0.2] * 5),
    ],
)
def test_dry_on_equal_probabilities(
    bench: Any, vocabulary: int, history: list[int], options: dict[str, Any], expected: Sequence[float]
) -> None:
    dry = DRY(**{"multiplier": 1.0, "base": 1.75, "allowed_length": 2, **options})
    assert bench.probs(bench.apply(dry, bench.of_probs([1 / vocabulary] * vocabulary), history)) == near(expected)
