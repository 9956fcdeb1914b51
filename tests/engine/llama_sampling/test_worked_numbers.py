"""Numbers that spec/samplers.md works out in sections 3.2 to 3.4, 4 and 5, to the six decimals that it prints."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.llama_sampling.candidates import Candidates, entropy32, log32
from engine.llama_sampling.dry import DRY
from engine.llama_sampling.filters import TopNSigma, TopP, TypicalP
from engine.llama_sampling.mirostat import Mirostat, MirostatV2, keep_count, zipf_exponent
from engine.llama_sampling.penalties import LogitBias, Penalties
from engine.llama_sampling.temperature import DynamicTemperature, entropy_dependent_temperature

Q = (0.5, 0.25, 0.125, 0.0625, 0.0625)
Z = (2.0, -1.0, 0.5, 3.0, 0.0, 1.0, -2.0, 4.0)
SIGMA = (5.0, 4.5, 3.0, 1.0, -2.0, -3.5)


def near(expected: Sequence[float] | float) -> Any:
    return pytest.approx(expected if isinstance(expected, float) else list(expected), abs=1e-6)


def test_typical_scores_are_distances_from_the_entropy(bench: Any) -> None:
    probs = bench.of_probs(Q).softmaxed().probs
    entropy = entropy32(probs)
    assert float(entropy) == near(1.299651)
    scores = np.abs(-log32(probs) - entropy)
    assert scores.tolist() == near([0.606504, 0.086643, 0.779791, 1.472938, 1.472938])


@pytest.mark.parametrize(
    ("p", "ids", "probs"),
    [
        (0.5, [1, 0], [0.333333, 0.666667]),
        (0.9, [1, 0, 2, 3], [0.266667, 0.533333, 0.133333, 0.066667]),
    ],
)
def test_typical_gives_survivors_by_score(bench: Any, p: float, ids: list[int], probs: list[float]) -> None:
    kept = bench.apply(TypicalP(p), bench.of_probs(Q))
    assert kept.ids.tolist() == ids
    assert bench.probs(kept) == near(probs)
    assert not kept.is_sorted


def test_top_p_cuts_a_tie_that_the_mlx_filter_keeps(bench: Any) -> None:
    kept = bench.apply(TopP(0.9), bench.of_probs(Q))
    assert kept.ids.tolist() == [0, 1, 2, 3]
    assert bench.probs(kept) == near([0.533333, 0.266667, 0.133333, 0.066667])


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0.5, [0.622459, 0.377541, 0, 0, 0, 0]),
        (1.0, [0.574097, 0.348207, 0.077696, 0, 0, 0]),
        (1.5, [0.568123, 0.344584, 0.076887, 0.010406, 0, 0]),
    ],
)
def test_top_n_sigma_masks_below_n_deviations(bench: Any, n: float, expected: list[float]) -> None:
    kept = bench.apply(TopNSigma(n), Candidates.from_logits(SIGMA))
    assert bench.probs(kept) == near(expected)


def test_top_n_sigma_keeps_the_order_that_candidates_had(bench: Any) -> None:
    kept = bench.apply(TopNSigma(1.0), Candidates.from_logits(SIGMA[::-1]))
    assert kept.ids.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (DynamicTemperature(1, 0.5, 1), [0.426876, 0.251230, 0.147857, 0.087019, 0.087019]),
        (DynamicTemperature(0.8, 0.3, 2), [0.536331, 0.246418, 0.113217, 0.052018, 0.052018]),
    ],
)
def test_dynamic_temperature_follows_the_entropy(
    bench: Any, sampler: DynamicTemperature, expected: list[float]
) -> None:
    after = bench.apply(sampler, bench.of_probs(Q))
    assert after.probs.tolist() == near(expected)
    assert bench.probs(after) == near(expected)


def test_penalties_divide_first_and_subtract_then(bench: Any) -> None:
    history = [5, 5, 5, 7, 1, 4, 4]
    after = bench.apply(Penalties(repeat=1.2, frequency=0.25, presence=0.5), Candidates.from_logits(Z), history)
    assert after.logits.tolist() == near([2, -1.95, 0.5, 3, -1.0, -0.416667, -2, 2.583333])


def test_bias_comes_before_penalties_and_the_order_shows(bench: Any) -> None:
    bias, repeat = LogitBias({5: -1.0}), Penalties(repeat=1.2)
    candidates = Candidates.from_logits(Z)
    bias_first = bench.apply(repeat, bench.apply(bias, candidates), [5])
    repeat_first = bench.apply(bias, bench.apply(repeat, candidates, [5]))
    assert float(bias_first.logits[5]) == 0.0
    assert float(repeat_first.logits[5]) == near(-0.166667)


def test_dry_penalises_by_the_longest_repetition_that_a_token_continues() -> None:
    dry = DRY(multiplier=1, base=1.75, allowed_length=2)
    lengths = dry.repeat_lengths([ord(letter) for letter in "abccbcyabc"])
    assert {chr(token): float(dry.penalty(length)) for token, length in lengths.items()} == {"c": 1.75, "y": 1.0}


def test_mirostat_fits_the_exponent_of_a_zipf_law() -> None:
    ranks = np.arange(1, 101) ** -1.3
    exponent = zipf_exponent((ranks / ranks.sum()).astype(np.float32), 100)
    assert float(exponent) == near(1.3)
    assert [keep_count(exponent, mu, 100) for mu in (10, 4, 3)] == [102, 4, 2]


def test_mirostat_v2_steers_mu_by_the_surprisal_of_what_it_drew(bench: Any) -> None:
    pick, script = MirostatV2(tau=1, eta=0.5), bench.Script(0.1, 0.6, 0.9)
    mus, ids = [], []
    for _ in range(3):
        picked = pick.pick(bench.of_probs(Q), bench.context(vocabulary=5, script=script))
        assert picked.candidates.probs.tolist() == near([0.666667, 0.333333])
        ids.append(int(picked.candidates.ids[picked.index]))
        pick = picked.pick
        mus.append(pick.mu)
    assert ids == [0, 0, 1]
    assert mus == near([2.207519, 2.415038, 2.122556])


@pytest.mark.parametrize("pick", [Mirostat(tau=2, eta=0.5), MirostatV2(tau=2, eta=0.5)])
def test_mirostat_leaves_the_state_that_it_was_given_alone(bench: Any, pick: Any) -> None:
    # llama.cpp's clone of version 1 writes into its source; a value cannot.
    first = pick.pick(bench.of_probs(Q), bench.context(vocabulary=5, seed=1))
    again = pick.pick(bench.of_probs(Q), bench.context(vocabulary=5, seed=1))
    assert pick.mu is None
    assert first.pick.mu is not None
    assert (first.index, first.pick) == (again.index, again.pick)


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [(0.05, 0.035184), (0.1, 0.035184), (0.5, 0.512), (1.0, 0.715542), (2.0, 0.845897), (4.0, 0.919727)],
)
def test_entropy_dependent_temperature(entropy: float, expected: float) -> None:
    assert entropy_dependent_temperature(entropy) == near(expected)
