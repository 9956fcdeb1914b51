"""Processors: worked numbers, windows, order, the input untouched, and what is refused."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.sampling.processors import Processing, process

Z = [2.0, -1.0, 0.5, 3.0, 0.0, 1.0, -2.0, 4.0]


@pytest.mark.parametrize(
    ("options", "history", "expected"),
    [
        ({"repetition_penalty": 1.2}, [5, 5, 5, 7], [2, -1, 0.5, 3, 0, 0.833333, -2, 3.333333]),
        ({"presence_penalty": 0.5}, [5, 5, 5, 7], [2, -1, 0.5, 3, 0, 0.5, -2, 3.5]),
        ({"frequency_penalty": 0.5}, [5, 5, 5, 7], [2, -1, 0.5, 3, 0, -0.5, -2, 3.5]),
        (
            {
                "logit_bias": {5: -1.0, 2: 2.0},
                "repetition_penalty": 1.2,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
            },
            [5, 5, 5, 7],
            [2, -1, 2.5, 3, 0, -1.25, -2, 2.583333],
        ),
        ({"repetition_penalty": 1.5}, [1, 6, 5, 7], [2, -1.5, 0.5, 3, 0, 0.666667, -3, 2.666667]),
        ({"repetition_penalty": 1.2, "repetition_window": 1}, [5, 7], [2, -1, 0.5, 3, 0, 1, -2, 3.333333]),
        ({"repetition_penalty": 1.2, "repetition_window": 0}, [5, 7], [2, -1, 0.5, 3, 0, 0.833333, -2, 3.333333]),
        ({"repetition_penalty": 1.0}, [0, 1, 2], Z),
        ({"presence_penalty": -0.5}, [0], [2.5, *Z[1:]]),
        ({"presence_penalty": 0.5, "presence_window": 99}, [0, 1], [1.5, -1.5, *Z[2:]]),
        ({"frequency_penalty": 0.5}, [], Z),
        ({}, [1, 2, 3], Z),
    ],
)
def test_logits_become_what_the_worked_numbers_say(
    options: dict[str, Any], history: list[int], expected: list[float]
) -> None:
    out = process(mx.array([Z]), history, Processing(**options))
    assert np.array(out).astype(np.float64)[0].round(6).tolist() == expected


def test_a_masked_logit_stays_masked_under_every_penalty() -> None:
    options = Processing(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
    assert process(mx.array([[-float("inf"), 1.0]]), [0, 0], options)[0, 0].item() == -float("inf")


@given(
    history=st.lists(st.integers(0, 7), max_size=30),
    penalty=st.sampled_from(["repetition", "presence", "frequency"]),
    window=st.integers(0, 40),
    bfloat16=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_penalties_touch_exactly_the_tokens_of_their_window_and_never_the_input(
    history: list[int], penalty: str, window: int, *, bfloat16: bool
) -> None:
    rows = mx.array([[2.0, -1.0, 0.5, 3.0, 0.25, 1.0, -2.0, 4.0]]).astype(mx.bfloat16 if bfloat16 else mx.float32)
    before = rows.tolist()

    out = process(rows, history, Processing(**{f"{penalty}_penalty": 1.5, f"{penalty}_window": window}))

    seen = set(history[-window:] if window else history)
    assert {i for i, (a, b) in enumerate(zip(before[0], out.tolist()[0], strict=True)) if a != b} == seen
    assert rows.tolist() == before
    assert out.dtype == rows.dtype


def test_the_prompt_and_what_was_fed_count_alike() -> None:
    options = Processing(presence_penalty=1.0)
    prompt, fed = [3], [5]
    out = process(mx.array([Z]), prompt + fed, options)
    assert out.tolist() == [[2, -1, 0.5, 2, 0, 0, -2, 4]]


def test_bias_comes_before_repetition() -> None:
    out = process(mx.array([Z]), [5], Processing(logit_bias={5: -1.0}, repetition_penalty=1.2))
    assert out[0, 5].item() == 0  # the other way round it would be 1 / 1.2 - 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"logit_bias": {"5": 1.0}}, "logit_bias must be a dict of int to float"),
        ({"logit_bias": {5: "x"}}, "logit_bias must be a dict of int to float"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be a dict of int to float"),
        ({"repetition_penalty": -0.5}, "repetition_penalty must be a non-negative float"),
        ({"presence_penalty": float("nan")}, "presence_penalty is not a number"),
        ({"frequency_penalty": "0.5"}, "frequency_penalty is not a number"),
        ({"frequency_window": -1}, "frequency_window is not a number of tokens"),
        ({"presence_window": 2.0}, "presence_window is not a number of tokens"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=r"\n  next +") as refused:
        Processing(**options)
    assert refused.value.what == what


@pytest.mark.parametrize(
    ("options", "history", "what"),
    [
        (Processing(logit_bias={8: 1.0}), [], "logit_bias names tokens outside the vocabulary"),
        (Processing(presence_penalty=1.0), [0, 8], "the history holds tokens outside the vocabulary"),
    ],
)
def test_tokens_that_the_logits_do_not_have_are_refused(options: Processing, history: list[int], what: str) -> None:
    with pytest.raises(RequestError) as refused:
        process(mx.array([Z]), history, options)
    assert str(refused.value) == (
        f"{what}\n  ids         8\n  vocabulary  0 to 7\n  next        tokenise with the tokenizer of this snapshot"
    )


def test_a_batch_is_processed_row_by_row(
    same_bits: Callable[[Any, Any], None], normal: Callable[..., mx.array]
) -> None:
    rows, options = normal(1, (3, 8)), Processing(repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={1: 0.5})
    out = process(rows, [1, 2, 2], options)
    for index in range(3):
        same_bits(process(rows[index : index + 1], [1, 2, 2], options), out[index : index + 1])
