"""Samplers as values draw what the samplers that they are made of draw, and leave their former selves alone."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine.branch.samplers import BranchSampler, ChainSampler, GreedySampler, LlamaSampler, OptiqSampler
from engine.errors import RequestError
from engine.generate import greedy
from engine.llama_sampling.generators import Mt19937, Xoroshiro128Plus
from engine.llama_sampling.history import TokenHistoryTracker
from engine.llama_sampling.mirostat import MirostatV2
from engine.llama_sampling.penalties import Penalties
from engine.llama_sampling.strategy import SamplingStrategy, sample_with_strategy
from engine.llama_sampling.xtc import XTC
from engine.sampling import optiq_chain
from engine.sampling.chain import Chain
from engine.sampling.keys import CounterKeys, SequentialKeys
from engine.sampling.optiq_chain import OptiqChain
from engine.sampling.picker import ChainPicker
from engine.sampling.processors import Processing

Normal = Callable[..., mx.array]
PROMPT = (3, 7, 7, 20)
STEPS = 24


@pytest.fixture
def rows(normal: Normal) -> list[mx.array]:
    return [normal(seed, (1, 64)) * 3 for seed in range(STEPS)]


def drawn(sampler: BranchSampler, rows: list[mx.array]) -> list[int]:
    ids = []
    sampler = sampler.given(PROMPT)
    for row in rows:
        draw, sampler = sampler.draw(row)
        sampler = sampler.accepted(draw.token_id)
        ids.append(draw.token_id)
    return ids


@pytest.mark.parametrize("keys", [SequentialKeys.of(3), CounterKeys(seed=3)])
@pytest.mark.parametrize("xtc", [0.0, 0.6])
def test_the_chain_draws_what_its_picker_picks(
    rows: list[mx.array], keys: SequentialKeys | CounterKeys, xtc: float
) -> None:
    chain = Chain(temperature=0.8, top_p=0.9, top_k=20, xtc_probability=xtc, xtc_threshold=0.02)
    processing = Processing(repetition_penalty=1.4, presence_penalty=0.3, logit_bias={5: -2.0})
    picker = ChainPicker(chain, PROMPT, keys=keys, processing=processing)
    picked = [picker(row, index) for index, row in enumerate(rows)]
    assert drawn(ChainSampler(chain=chain, keys=keys, processing=processing), rows) == picked
    assert len(set(picked)) > 3


def test_greedy_draws_what_the_loop_picks(rows: list[mx.array]) -> None:
    assert drawn(GreedySampler(), rows) == [greedy(row, 0) for row in rows]


def test_optiqs_chain_draws_what_it_samples(rows: list[mx.array]) -> None:
    chain, keys, sampled = OptiqChain(temperature=0.9, top_k=12, min_p=0.05), SequentialKeys.of(11), []
    for row in rows:
        ids_B, keys = optiq_chain.sample(row, chain, keys)
        sampled.append(int(np.array(ids_B)[0]))
    assert drawn(OptiqSampler(chain=chain, keys=SequentialKeys.of(11)), rows) == sampled


def strategy() -> SamplingStrategy:
    samplers = (Penalties(repeat=1.3, last_n=8), XTC(probability=0.5, threshold=0.05))
    return SamplingStrategy(samplers=samplers, pick=MirostatV2(tau=3.0))


def test_llamas_samplers_draw_what_they_sample(rows: list[mx.array]) -> None:
    params, prng, xtc, history, sampled = strategy(), Mt19937(1), Xoroshiro128Plus(2), TokenHistoryTracker(8), []
    for row in rows:
        one = sample_with_strategy(np.array(row)[0], token_history=history, params=params, prng=prng, xtc_prng=xtc)
        params = one.params
        history.accept(one.token_id)
        sampled.append(one.token_id)
    sampler = LlamaSampler(
        strategy=strategy(), prng=Mt19937(1), xtc_prng=Xoroshiro128Plus(2), history=TokenHistoryTracker(8)
    )
    assert drawn(sampler, rows) == sampled


SAMPLERS: list[Callable[[], BranchSampler]] = [
    GreedySampler,
    lambda: ChainSampler(
        chain=Chain(temperature=1.0, xtc_probability=0.5),
        keys=SequentialKeys.of(1),
        processing=Processing(frequency_penalty=0.5),
    ),
    lambda: OptiqSampler(chain=OptiqChain(temperature=1.0), keys=CounterKeys(seed=1)),
    lambda: LlamaSampler(strategy=strategy(), prng=Mt19937(1), xtc_prng=Mt19937(2)),
]


@pytest.mark.parametrize("made", SAMPLERS)
def test_a_sampler_draws_the_same_again_from_where_it_stood(
    rows: list[mx.array], made: Callable[[], BranchSampler]
) -> None:
    sampler = made()
    first = drawn(sampler, rows)
    assert drawn(sampler, rows) == first, "drawing has changed the sampler that it started from"


def nats_by_hand(row: mx.array, left: list[int], token_id: int, temperature: float) -> float:
    logits = np.array(row, dtype=np.float64)[0, left] / temperature
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return float(-np.log(shares[left.index(token_id)]))


def test_a_draws_surprisal_is_among_the_tokens_that_were_left(rows: list[mx.array]) -> None:
    row = rows[0]
    best = [int(i) for i in np.argsort(-np.array(row)[0])[:5]]
    chain = ChainSampler(chain=Chain(temperature=0.7, top_k=5), keys=SequentialKeys.of(1))
    optiq = OptiqSampler(chain=OptiqChain(temperature=0.7, top_k=5), keys=SequentialKeys.of(1))
    whole = SamplingStrategy.lloyal(temperature=0.7, top_k=5, top_p=1.0, min_p=0.0, penalties=Penalties(last_n=0))
    llama = LlamaSampler(strategy=whole, prng=Mt19937(1))
    for sampler in (chain, optiq, llama):
        draw, _ = sampler.draw(row)
        assert draw.nats == pytest.approx(nats_by_hand(row, best, draw.token_id, 0.7), abs=1e-5)
    assert GreedySampler().draw(row)[0].nats == 0.0
    one = ChainSampler(chain=Chain(temperature=0.7, top_k=1), keys=SequentialKeys.of(1))
    assert one.draw(row)[0].nats == pytest.approx(0.0)


def test_prompts_count_for_mlx_lms_penalties_and_not_for_llamas() -> None:
    chain = ChainSampler(chain=Chain(), keys=SequentialKeys.of(1)).given([1, 2])
    llama = LlamaSampler(strategy=strategy(), prng=Mt19937(1)).given([1, 2])
    assert chain.accepted(3).history == (1, 2, 3)
    assert llama.accepted(3).history.tokens == (3,)


@pytest.mark.parametrize("made", SAMPLERS[1:])
def test_a_row_without_probabilities_is_refused(made: Callable[[], BranchSampler]) -> None:
    with pytest.raises(RequestError, match="NaN"):
        made().draw(mx.array([[0.0, float("nan"), 1.0]]))
