"""What holds for all logits: sets by their definition in float64, survivors, limits, seeds, untouched inputs."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.context import Context, Pick, Sampler
from engine.llama_sampling.draw import Dist, Greedy
from engine.llama_sampling.dry import DRY, common_prefixes
from engine.llama_sampling.filters import MinP, TopK, TopNSigma, TopP, TypicalP
from engine.llama_sampling.generators import Mt19937, Xoroshiro128Plus
from engine.llama_sampling.mirostat import Mirostat, MirostatV2
from engine.llama_sampling.penalties import LogitBias, Penalties
from engine.llama_sampling.strategy import SamplingStrategy, sample_with_strategy
from engine.llama_sampling.temperature import DynamicTemperature, Temperature
from engine.llama_sampling.xtc import XTC

Row = npt.NDArray[np.float32]
AWAY = 1e-4  # from a cut: nearer, float32 may decide otherwise than float64

rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40).map(lambda v: np.array(v, dtype=np.float32))
distinct_rows = st.lists(st.integers(-2000, 2000), min_size=1, max_size=40, unique=True).map(
    lambda v: (np.array(v) / 128).astype(np.float32)
)
masked_rows = st.tuples(rows, st.lists(st.booleans(), min_size=40, max_size=40)).map(
    lambda t: np.where(np.array(t[1])[: len(t[0])], np.float32(-np.inf), t[0])
)
shares = st.floats(0, 1.25, width=32)
seeds = st.integers(0, 2**32 - 2)
samplers: st.SearchStrategy[Sampler] = st.one_of(
    st.builds(TopK, st.integers(-1, 50)),
    st.builds(TopP, shares, st.integers(0, 5)),
    st.builds(MinP, shares, st.integers(0, 5)),
    st.builds(TypicalP, shares, st.integers(0, 5)),
    st.builds(TopNSigma, st.floats(-1, 3, width=32)),
    st.builds(Temperature, st.one_of(st.just(0.0), st.floats(0.0625, 8, width=32))),
    st.builds(DynamicTemperature, st.floats(0, 2, width=32), st.floats(0, 2, width=32), st.floats(0, 3, width=32)),
    st.builds(XTC, shares.filter(lambda p: p <= 1), shares, st.integers(0, 5)),
    st.builds(
        Penalties,
        repeat=st.floats(0.5, 2, width=32),
        frequency=st.floats(-1, 1, width=32),
        presence=st.floats(-1, 1, width=32),
        last_n=st.integers(-1, 8),
    ),
    st.builds(DRY, multiplier=st.floats(0, 2, width=32), base=st.floats(1, 3, width=32), last_n=st.integers(-1, 12)),
    st.just(LogitBias({0: 0.5})),
)
picks: st.SearchStrategy[Pick] = st.one_of(
    st.just(Dist()),
    st.just(Greedy()),
    st.builds(Mirostat, tau=st.floats(0, 8, width=32), eta=st.floats(0, 1, width=32)),
    st.builds(MirostatV2, tau=st.floats(0, 8, width=32), eta=st.floats(0, 1, width=32)),
)
histories = st.lists(st.integers(0, 8), max_size=16)


def surroundings(row: Row, history: list[int] | None = None, seed: int = 0) -> Context:
    return Context(history=history or [], vocabulary=len(row), prng=Mt19937(seed), xtc_prng=Mt19937(seed))


def survivors(sampler: Sampler, row: Row) -> set[int]:
    return set(sampler.apply(Candidates.from_logits(row), surroundings(row)).ids.tolist())


def exact_probs(row: Row) -> npt.NDArray[np.float64]:
    terms = np.exp(row.astype(np.float64) - row.max())
    return np.asarray(terms / terms.sum())


@given(distinct_rows, st.integers(1, 50))
def test_top_k_keeps_the_k_largest(row: Row, k: int) -> None:
    assert survivors(TopK(k), row) == set(np.argsort(-row)[:k].tolist())


@given(distinct_rows, st.floats(1 / 64, 63 / 64, width=32))
def test_top_p_keeps_the_smallest_leading_set_that_reaches_p(row: Row, p: float) -> None:
    order = np.argsort(-row)
    mass = np.cumsum(exact_probs(row)[order])
    assume(np.abs(mass - p).min() > AWAY)
    assert survivors(TopP(p), row) == set(order[: int((mass < p).sum()) + 1].tolist())


@given(distinct_rows, st.floats(1 / 64, 63 / 64, width=32))
def test_min_p_keeps_what_reaches_a_share_of_the_largest(row: Row, p: float) -> None:
    ratio = exact_probs(row) / exact_probs(row).max()
    assume(np.abs(ratio - p).min() > AWAY)
    assert survivors(MinP(p), row) == set(np.flatnonzero(ratio >= p).tolist())


@given(distinct_rows, st.floats(0.25, 3, width=32))
def test_top_n_sigma_leaves_possible_what_lies_within_n_deviations(row: Row, n: float) -> None:
    exact = row.astype(np.float64)
    floor = exact.max() - n * exact.std()
    assume(len(row) > 1 and np.abs(exact - floor).min() > AWAY)
    after = TopNSigma(n).apply(Candidates.from_logits(row), surroundings(row))
    assert set(after.ids[np.isfinite(after.logits)].tolist()) == set(np.flatnonzero(exact >= floor).tolist())


@given(distinct_rows, st.floats(1 / 64, 63 / 64, width=32))
def test_typical_keeps_the_smallest_set_nearest_to_the_entropy_that_exceeds_p(row: Row, p: float) -> None:
    probs = exact_probs(row)
    distance = np.abs(-np.log(probs) + (probs * np.log(probs)).sum())
    order = np.argsort(distance)
    mass = np.cumsum(probs[order])
    assume(np.abs(mass - p).min() > AWAY)
    assume(len(row) < 2 or np.diff(distance[order]).min() > AWAY)
    assert survivors(TypicalP(p), row) == set(order[: int((mass <= p).sum()) + 1].tolist())


@given(distinct_rows, st.floats(1 / 64, 0.5, width=32))
def test_xtc_drops_exactly_the_leading_choices_above_the_last_that_clears_the_threshold(row: Row, share: float) -> None:
    probs = exact_probs(row)
    assume(np.abs(probs - share).min() > AWAY)
    clearing = [int(i) for i in np.argsort(-probs) if probs[i] >= share]
    assert survivors(XTC(1.0, share, 0), row) == set(range(len(row))) - set(clearing[:-1])


@settings(max_examples=300)
@given(masked_rows, st.lists(samplers, max_size=5), picks, histories, seeds)
def test_any_chain_leaves_something_possible_picks_it_and_touches_no_input(
    row: Row, chain: list[Sampler], pick: Pick, history: list[int], seed: int
) -> None:
    assume(np.isfinite(row).any())
    before, past = row.copy(), list(history)
    params = SamplingStrategy(samplers=tuple(chain), pick=pick)
    results = [sample_with_strategy(row, token_history=history, params=params, prng=Mt19937(seed)) for _ in range(2)]
    sampled = results[0]
    assert 0 <= sampled.token_id < len(row)
    assert np.isfinite(row[sampled.token_id])
    assert np.isfinite(sampled.candidates.logits).any()
    assert len(set(sampled.candidates.ids.tolist())) == len(sampled.candidates)
    assert row.tobytes() == before.tobytes()
    assert history == past
    assert results[1].token_id == sampled.token_id
    assert results[1].params == sampled.params


@given(masked_rows, samplers, histories)
def test_no_sampler_changes_the_candidates_that_it_is_given(row: Row, sampler: Sampler, history: list[int]) -> None:
    assume(np.isfinite(row).any())
    candidates = Candidates.from_logits(row)
    ids, logits = candidates.ids.tobytes(), candidates.logits.tobytes()
    after = sampler.apply(candidates, surroundings(row, history))
    assert (candidates.ids.tobytes(), candidates.logits.tobytes()) == (ids, logits)
    assert not candidates.logits.flags.writeable
    assert not after.logits.flags.writeable
    assert not after.is_sorted or (np.diff(after.logits[np.isfinite(after.logits)]) <= 0).all()


@given(distinct_rows)
def test_a_low_temperature_is_greedy_and_a_high_one_is_uniform(row: Row) -> None:
    context = surroundings(row)
    best = int(row.argmax())
    for cold in (Temperature(0), Temperature(1e-5)):
        probs = cold.apply(Candidates.from_logits(row), context).softmaxed().probs
        assert probs is not None
        assert probs[best] == 1.0
    hot = Temperature(1e8).apply(Candidates.from_logits(row), context).softmaxed().probs
    assert hot is not None
    assert np.abs(hot * len(row) - 1).max() < 1e-5


@given(st.lists(st.integers(0, 2), max_size=30))
def test_common_prefixes_are_what_counting_gives(tokens: list[int]) -> None:
    def counted(place: int) -> int:
        pairs = zip(tokens, tokens[place:], strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), len(tokens) - place)

    assert common_prefixes(tokens) == [0 if place == 0 else counted(place) for place in range(len(tokens))]


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(0, 4))
def test_dry_lengths_are_the_longest_suffixes_that_stood_before_a_token(tokens: list[int], allowed: int) -> None:
    longest: dict[int, int] = {}
    for end in range(1, len(tokens)):  # the earlier occurrence ends before `end`, and tokens[end] followed it
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= allowed:
            longest[tokens[end]] = max(longest.get(tokens[end], 0), length)
    dry = DRY(multiplier=1, allowed_length=allowed)
    assert dry.repeat_lengths(tokens) == (longest if len(tokens) > allowed else {})


@given(rows, seeds)
def test_a_draw_never_gives_what_has_no_mass(row: Row, seed: int) -> None:
    row[1:] = -np.inf
    for number in (0.0, 1 - 2**-53, Mt19937(seed).next_double()):
        rolled = np.roll(row, 1)
        context = Context(history=[], vocabulary=len(row), prng=Fixed(number), xtc_prng=Fixed(number))
        picked = Dist().pick(Candidates.from_logits(rolled), context)
        assert np.isfinite(rolled[picked.index])


class Fixed:
    """A generator that always gives one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def next_double(self) -> float:
        return self.number

    def next_float(self) -> np.float32:
        return np.float32(self.number)

    def clone(self) -> "Fixed":
        return self


@pytest.mark.parametrize("kind", [Mt19937, Xoroshiro128Plus])
def test_one_seed_gives_one_run_and_two_seeds_give_two(kind: Any) -> None:
    row = np.zeros(64, dtype=np.float32)

    def run(seed: int) -> list[int]:
        prng = kind(seed)
        return [sample_with_strategy(row, params=SamplingStrategy(), prng=prng).token_id for _ in range(16)]

    assert run(0) == run(0)
    assert len({tuple(run(seed)) for seed in (0, 1, 42, 2**31)}) == 4


def test_xtc_without_a_threshold_leaves_what_is_possible() -> None:
    row = np.array([0, -np.inf, 1], dtype=np.float32)
    after = XTC(1.0, 0.0, 0).apply(Candidates.from_logits(row), surroundings(row))
    assert after.ids.tolist() == [0, 1]


def test_a_temperature_that_overflows_is_refused() -> None:
    row = np.array([1000, 0], dtype=np.float32)
    with pytest.raises(RequestError) as refused:
        Temperature(1e-38).apply(Candidates.from_logits(row), surroundings(row))
    assert str(refused.value).splitlines()[0] == "the temperature is so low that logits overflow"
    assert str(refused.value).endswith("use temperature 0 for the most probable token")
