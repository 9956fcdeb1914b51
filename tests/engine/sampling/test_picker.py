"""The picker: history, keys and refusals, inside the loop and beside it."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.errors import RequestError
from engine.generate import steps
from engine.model import CausalModel
from engine.sampling.chain import Chain
from engine.sampling.keys import CounterKeys, SequentialKeys
from engine.sampling.picker import ChainPicker
from engine.sampling.processors import Processing


def test_a_seed_repeats_a_generation_and_another_changes_it(llama: Callable[..., CausalModel]) -> None:
    def run(seed: int) -> list[int]:
        pick = ChainPicker(Chain(temperature=1.0, top_p=0.95), [1, 2, 3], keys=SequentialKeys.of(seed))
        return [step.token_id for step in steps(llama(), [1, 2, 3], num_steps=12, pick=pick)]

    assert run(0) == run(0) != run(1)


def test_penalties_see_the_prompt_and_what_was_given() -> None:
    row = mx.array([[5.0, 4.0, 3.0, 2.0]])
    pick = ChainPicker(Chain(), [0], keys=SequentialKeys.of(0), processing=Processing(presence_penalty=10.0))
    assert [pick(row, i) for i in range(3)] == [1, 2, 3]
    assert row.tolist() == [[5.0, 4.0, 3.0, 2.0]]


def test_counter_keys_advance_by_a_step_a_token(normal: Callable[..., mx.array]) -> None:
    row = normal(1, (1, 400))
    pick = ChainPicker(Chain(temperature=1.0), [1], keys=CounterKeys(seed=3))
    whole = [pick(row, i) for i in range(6)]
    later = ChainPicker(Chain(temperature=1.0), [1], keys=CounterKeys(seed=3, step=4))
    assert [later(row, i) for i in range(2)] == whole[4:]


def test_a_row_without_probabilities_is_refused() -> None:
    pick = ChainPicker(Chain(temperature=1.0), [0], keys=SequentialKeys.of(0))
    with pytest.raises(RequestError, match="row 0 of the logits holds NaN"):
        pick(mx.array([[0.0, float("nan")]]), 0)
