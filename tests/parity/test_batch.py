"""A batch: what fits together, how its sequences share a case's ids, and its round trip through JSON."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.batch import FILLS, Batch
from parity.case import Case, Feed
from parity.errors import CaseError
from parity.sampling import Sampling

BATCH = Batch(fill="right", lengths=(3, 1, 2), steps=(2, 4, 1), joins=(0, 0, 5))


@given(
    fill=st.sampled_from(FILLS),
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=5),
)
def test_a_batch_is_equal_after_a_round_trip_and_knows_the_place_of_every_row(
    fill: Any, rows: list[tuple[int, int, int]]
) -> None:
    lengths, steps, joins = zip(*rows, strict=True)
    batch = Batch(fill=fill, lengths=lengths, steps=steps, joins=(0,) * len(rows) if fill == "left" else joins)
    assert Batch.from_json(batch.to_json()) == batch
    places = list(batch.rows())
    assert [batch.place(row) for row in range(sum(steps))] == places
    assert [batch.row(*place) for place in places] == list(range(sum(steps)))
    with pytest.raises(IndexError):
        batch.place(sum(steps))


def test_ids_are_cut_sequence_by_sequence() -> None:
    assert BATCH.prompts((1, 2, 3, 4, 5, 6)) == ((1, 2, 3), (4,), (5, 6))
    assert BATCH.forced((1, 2, 3, 4, 5, 6, 7)) == ((1, 2), (3, 4, 5, 6), (7,))


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": (3, 1)},
        {"lengths": (3, 1, 0)},
        {"steps": (2, 4, 0)},
        {"joins": (0, 0, -1)},
        {"fill": "left"},
        {"fill": "middle"},
        {"lengths": (), "steps": (), "joins": ()},
    ],
)
def test_what_no_loop_could_run_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CaseError) as caught:
        replace(BATCH, **changes)
    wrong = {"fill": "right", "lengths": (3, 1, 2), "steps": (2, 4, 1), "joins": (0, 0, 5)} | changes
    assert str(caught.value) == (
        "a batch does not fit together\n"
        f"  fill     {wrong['fill']}\n"
        f"  lengths  {list(wrong['lengths'])}\n"
        f"  steps    {list(wrong['steps'])}\n"
        f"  joins    {list(wrong['joins'])}\n"
        "  next     give one of each a sequence, of at least 1, 1 and 0; fill is one of left, right, merged; prompts padded at"
        " their left begin together"
    )


@pytest.fixture
def batch_case(make_case: Callable[..., Case]) -> Callable[..., Case]:
    def make(**changes: Any) -> Case:
        fields = {
            "prompt_ids": (1, 2, 3, 4, 5, 6),
            "forced_ids": (1, 2, 3, 4, 5, 6, 7),
            "num_steps": 7,
            "feed": Feed(mode="tail-split"),
            "batch": BATCH,
        }
        return make_case(**{**fields, **changes})

    return make


def test_a_batch_case_is_equal_after_a_round_trip_through_json(batch_case: Callable[..., Case]) -> None:
    case = batch_case()
    assert Case.from_json(case.to_json()) == case
    assert (case.num_rows, case.num_ids) == (7, 7)


def test_an_unknown_key_of_a_batch_is_refused(batch_case: Callable[..., Case]) -> None:
    raw = batch_case().to_json()
    raw["batch"] = {**BATCH.to_json(), "leaves": [1, 2, 3]}
    with pytest.raises(CaseError, match="unknown: leaves"):
        Case.from_json(raw)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": (1, 2, 3, 4, 5)},
        {"num_steps": 6, "forced_ids": None},
        {"record": ("*",)},
        {"feed": Feed(mode="whole")},
        {"sampling": Sampling(chain="mlx-lm", options=(), rows="flat", num_rows=1, batch=1, seed=0)},
    ],
)
def test_a_case_that_does_not_fit_its_batch_is_refused(
    batch_case: Callable[..., Case], changes: dict[str, Any]
) -> None:
    with pytest.raises(CaseError, match="does not fit its batch"):
        batch_case(**changes)


def test_the_refusal_tells_what_does_not_fit(batch_case: Callable[..., Case]) -> None:
    with pytest.raises(CaseError) as caught:
        batch_case(prompt_ids=(1, 2), name="toy")
    assert str(caught.value) == (
        "case toy does not fit its batch\n"
        "  prompts  2 tokens for 6\n"
        "  steps    7 for 7\n"
        "  feed     tail-split, filled right\n"
        "  next     give the ids and steps of all sequences, and nothing to draw or to record; feed whole fits left"
    )
