"""The words of an explanation, on evidence that is made up."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from parity.case import Case, Feed
from parity.compare import TensorDiff
from parity.distribution import RowDistance
from parity.explaining.cause import Cause, Rescore, Sighting, cause_of
from parity.explaining.explain import Explanation
from parity.explaining.position import Shortest
from parity.explaining.report import as_json, message
from parity.kv import KV
from parity.localize import Place
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace

CASE = Case(
    name="toy/f32/fp/forced/p3-whole",
    snapshot="toy",
    dtype="f32",
    prompt_ids=(1, 2, 3),
    forced_ids=(4, 5),
    feed=Feed(mode="whole"),
    kv=KV(),
    num_steps=2,
)
RIGHT, WRONG = (Tensor.of(np.array([[1.0, x, 3.0, 4.0]], dtype="<f4")) for x in (2.0, 2.5))
DIFF = TensorDiff.of(RIGHT, WRONG)
EMPTY = Trace(tensors={TOKEN_IDS: Tensor.of(np.array([4, 5], dtype="<i4"))})
SCORE = Rescore(module="model.layers.0.self_attn.q_proj", oracle=3e-8, engine=0.5, bound=2e-7)


def place(**fields: Any) -> Place:
    given: dict[str, Any] = {
        "step": 0,
        "module": "model.layers.0.self_attn.q_proj",
        "operation": "the product with its weight, or its bias",
        "before": ("model.embed_tokens", "model.layers.0.input_layernorm"),
        "inputs_identical": True,
        "diff": DIFF,
        "heads": (0, 1),
    }
    return Place(**{**given, **fields})


def explanation(**fields: Any) -> Explanation:
    given: dict[str, Any] = {
        "case": CASE,
        "expected_name": "mlx-lm 0.32.2",
        "place": place(),
        "origin": place(),
        "position": 1,
        "cause": Cause(kind="logic", evidence=SCORE.described(), side="engine", rescore=SCORE),
        "row": RowDistance.of(RIGHT, WRONG),
        "described": ("[0, 1]: expected a, actual b, 1 ULP", "1 of 4 elements; top-1 agrees, margin 1"),
        "shortest": Shortest(
            case=Case.from_json({**CASE.to_json(), "prompt_ids": [1, 2], "forced_ids": None}),
            place=place(),
            expected=EMPTY,
            actual=EMPTY,
        ),
    }
    return Explanation(**{**given, **fields})


def test_a_difference_is_told_from_the_step_to_the_next_command() -> None:
    assert message(explanation(), Path("rep")) == (
        "logits of toy/f32/fp/forced/p3-whole are not bit-identical to mlx-lm 0.32.2\n"
        "  step        0 of 2\n"
        "  first       [0, 1]: expected a, actual b, 1 ULP\n"
        "  count       1 of 4 elements; top-1 agrees, margin 1\n"
        "  earliest    model.layers.0.self_attn.q_proj\n"
        "  inputs      identical: model.embed_tokens, model.layers.0.input_layernorm, and every earlier position\n"
        "  operation   the product with its weight, or its bias\n"
        "  element     [0, 1]: expected 0x40000000 (2.0), actual 0x40200000 (2.5), 2097152 ULP; "
        "1 of 4 elements, at most 2097152 ULP; heads 0, 1\n"
        "  position    1 of a prompt of 3: its first 2 tokens differ, one of 1 does not\n"
        "  cause       logic (float64 re-score of model.layers.0.self_attn.q_proj: oracle 3e-08 off, engine 0.5 off, "
        "rounding bound 2e-07)\n"
        "  reproducer  rep\n"
        "  next        python rep/reproduce.py, in any environment that has the oracle"
    )


def test_two_equal_runs_are_told_in_two_lines() -> None:
    same = Explanation(case=CASE, expected_name="mlx-lm 0.32.2")
    assert message(same) == (
        "toy/f32/fp/forced/p3-whole is bit-identical to mlx-lm 0.32.2: there is nothing to explain\n"
        "  compared  every module's output at the last position and the logits of 2 steps"
    )
    assert as_json(same)["status"] == "IDENTICAL"
    assert as_json(same)["cause"] is None


def test_what_runs_first_has_only_the_ids_before_it() -> None:
    first = place(module="model.embed_tokens", before=(), inputs_identical=False, heads=())
    lines = message(explanation(origin=first, place=first)).splitlines()
    assert "  inputs     the ids alone: no module runs before it" in lines
    assert lines[-1] == "  next       mend model.embed_tokens, then assay check 'toy/f32/fp/forced/p3-whole'"


def test_the_conversion_and_a_later_position_are_told() -> None:
    late = explanation(shortest=None, conversion="after", position=4)
    lines = message(late).splitlines()
    assert "  position    4 after a prompt of 3" in lines
    assert (
        "  conversion  the difference begins with it: the same case with keys and values as computed is bit-identical"
        in lines
    )
    before = message(explanation(conversion="before"))
    assert (
        "conversion  the difference predates it: the same case with keys and values as computed differs too" in before
    )


def test_a_wrong_oracle_is_to_be_reported() -> None:
    cause = Cause(kind="logic", evidence="e", side="oracle")
    last = message(explanation(cause=cause)).splitlines()[-1]
    assert last.split(maxsplit=1)[1] == "report it to the oracle's authors, and enter it in parity/deviations.toml"


def test_ids_that_differ_where_rows_agree_are_called_so() -> None:
    ids = place(module=TOKEN_IDS, diff=None, heads=())
    told = message(explanation(place=ids, origin=ids, row=None, described=None, shortest=None))
    assert told.startswith("token ids of toy/f32/fp/forced/p3-whole are not bit-identical")
    hidden = message(explanation(row=None, described=None))
    assert hidden.startswith("activations of toy/f32/fp/forced/p3-whole are not bit-identical")


def test_programs_get_the_same_under_fixed_keys() -> None:
    assert as_json(explanation(), Path("rep")) == {
        "case": "toy/f32/fp/forced/p3-whole",
        "status": "DIFFERENT",
        "oracle": "mlx-lm 0.32.2",
        "num_steps": 2,
        "first_step": 0,
        "earliest": "model.layers.0.self_attn.q_proj",
        "inputs_identical": True,
        "before": ["model.embed_tokens", "model.layers.0.input_layernorm"],
        "operation": "the product with its weight, or its bias",
        "element": [0, 1],
        "heads": [0, 1],
        "position": 1,
        "conversion": None,
        "cause": "logic",
        "side": "engine",
        "evidence": SCORE.described(),
        "rescore": {"module": "model.layers.0.self_attn.q_proj", "oracle": 3e-8, "engine": 0.5, "bound": 2e-7},
        "margin": None,
        "reproducer": "rep",
    }


def test_numbers_that_json_does_not_have_are_words() -> None:
    score = Rescore(module="m", oracle=0.5, engine=float("nan"), bound=1.0)
    cause = Cause(kind="logic", evidence="e", side="engine", rescore=score, margin=float("inf"))
    told = as_json(explanation(cause=cause))
    assert (told["rescore"], told["margin"]) == ({"module": "m", "oracle": 0.5, "engine": "nan", "bound": 1.0}, "inf")
    json.dumps(told, allow_nan=False)


def test_a_not_a_number_is_beyond_every_bound() -> None:
    assert Rescore(module="m", oracle=0.0, engine=float("nan"), bound=1.0).wrong == ("engine",)


def picked(expected: int, actual: int, row: list[float]) -> Cause:
    """The cause where rows agree and ids do not."""
    traces = [
        Trace(
            tensors={
                "logits/0": Tensor.of(np.array([row], dtype="<f4")),
                TOKEN_IDS: Tensor.of(np.array([token], dtype="<i4")),
            }
        )
        for token in (expected, actual)
    ]
    where = Place(step=0, module=TOKEN_IDS, operation="the choice")
    seen = Sighting(place=where, expected=traces[0], actual=traces[1], ids=(1,))
    return cause_of(seen, seen, "none")


def test_equal_logits_of_two_ids_are_a_tie() -> None:
    cause = picked(1, 2, [0.0, 5.0, 5.0])
    assert str(cause) == "tie (from the same row the oracle picks 1, the engine 2; their logits are 0 apart)"


def test_a_smaller_logit_is_no_tie() -> None:
    cause = picked(1, 0, [0.0, 5.0, 4.0])
    assert str(cause) == "logic (from the same row the oracle picks 1, the engine 0; top-2 margin 1)"
    assert (cause.side, picked(0, 1, [0.0, 5.0, 4.0]).side) == ("engine", "oracle")
