import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.llama_sampling.draw import Dist, Greedy
from engine.llama_sampling.generators import Mt19937
from engine.llama_sampling.history import TokenHistoryTracker
from engine.llama_sampling.mirostat import MirostatV2
from engine.llama_sampling.penalties import Penalties
from engine.llama_sampling.strategy import SamplingStrategy, sample_with_strategy
from engine.llama_sampling.strategy_table import strategy_of
from engine.llama_sampling.xtc import XTC

ROW = (np.arange(32) % 7 - 0.25 * np.arange(32)).astype(np.float32)
ROOT = Path(__file__).resolve().parents[3]


def test_samplers_run_in_the_order_that_is_given() -> None:
    row = np.log([0.5, 0.3, 0.2])
    tables: list[dict[str, Any]] = [{"name": "top_p", "p": 0.6}, {"name": "temperature", "temperature": 100.0}]
    counts = [
        len(sample_with_strategy(row, params=strategy_of(chain, {"name": "dist"}), prng=Mt19937(0)).candidates)
        for chain in (tables, tables[::-1])
    ]
    assert counts == [2, 2]
    tables[0]["p"] = 0.4
    counts = [
        len(sample_with_strategy(row, params=strategy_of(chain, {"name": "dist"}), prng=Mt19937(0)).candidates)
        for chain in (tables, tables[::-1])
    ]
    assert counts == [1, 2]


def test_the_lloyal_chain_is_the_tables_of_the_specification() -> None:
    tables: list[dict[str, Any]] = [
        {"name": "penalties", "last_n": 64},
        {"name": "top_k", "k": 40},
        {"name": "typical_p", "p": 1.0},
        {"name": "top_p", "p": 0.95},
        {"name": "min_p", "p": 0.05},
        {"name": "temperature", "temperature": 0.8},
    ]
    assert SamplingStrategy.lloyal() == strategy_of(tables, {"name": "dist"})


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_the_lloyal_chain_without_temperature_is_penalties_and_greedy(temperature: float) -> None:
    params = SamplingStrategy.lloyal(temperature=temperature, top_k=1, penalties=Penalties(repeat=1e6))
    assert params == SamplingStrategy(samplers=(Penalties(repeat=1e6),), pick=Greedy())
    best = int(ROW.argmax())
    first = sample_with_strategy(ROW, params=params, prng=Mt19937(0))
    second = sample_with_strategy(ROW, token_history=[best], params=params, prng=Mt19937(0))
    assert first.token_id == best
    assert second.token_id != best


def test_penalties_see_the_prompt_when_it_is_accepted_and_not_otherwise() -> None:
    params = SamplingStrategy(samplers=(Penalties(presence=100, last_n=4),), pick=Greedy())
    best = int(ROW.argmax())
    tracker = TokenHistoryTracker(4)
    assert sample_with_strategy(ROW, token_history=tracker, params=params, prng=Mt19937(0)).token_id == best
    tracker.accept(best)
    after = sample_with_strategy(ROW, token_history=tracker, params=params, prng=Mt19937(0)).token_id
    assert after != best
    tracker.accept(after)
    third = sample_with_strategy(ROW, token_history=tracker, params=params, prng=Mt19937(0)).token_id
    assert len({best, after, third}) == 3


def test_what_the_pick_learned_comes_back_and_two_branches_stay_apart() -> None:
    start = SamplingStrategy(pick=MirostatV2(tau=3))
    once = sample_with_strategy(ROW, params=start, prng=Mt19937(3))
    left, right = (sample_with_strategy(ROW, params=once.params, prng=Mt19937(seed)) for seed in (1, 2))
    assert start.pick == MirostatV2(tau=3)
    assert once.params.pick != start.pick
    assert replace(once.params, pick=Dist()) == SamplingStrategy()
    assert left.token_id != right.token_id
    assert left.params != right.params


def test_xtc_draws_from_its_own_generator_where_one_is_given() -> None:
    params = SamplingStrategy(samplers=(XTC(0.5, 0.01),))
    one, two, own = Mt19937(5), Mt19937(5), Mt19937(5)
    sample_with_strategy(ROW, params=params, prng=one)
    sample_with_strategy(ROW, params=params, prng=two, xtc_prng=own)
    plain = Mt19937(5)
    sample_with_strategy(ROW, params=SamplingStrategy(), prng=plain)
    assert two.next_raw() == plain.next_raw()
    two_outputs_and_one = Mt19937(5)
    for _ in range(3):
        two_outputs_and_one.next_raw()
    assert one.next_raw() == two_outputs_and_one.next_raw()


def test_sampling_needs_no_mlx() -> None:
    program = (
        "import sys; sys.modules['mlx'] = None\n"
        "from engine.llama_sampling.strategy_table import strategy_of\n"
        "from engine.llama_sampling.strategy import sample_with_strategy\n"
        "from engine.llama_sampling.generators import Mt19937\n"
        "params = strategy_of([{'name': 'top_k', 'k': 1}], {'name': 'dist'})\n"
        "print(sample_with_strategy([1.0, 3.0, 2.0], params=params, prng=Mt19937(0)).token_id)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")
