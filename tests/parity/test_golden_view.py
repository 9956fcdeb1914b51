import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from parity.case import Case
from parity.golden import Golden, TensorEntry
from parity.golden_view import GoldenView, rows_at_hand
from parity.sketch import sketch
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name


@pytest.fixture
def golden(
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_golden: Callable[..., Golden],
    make_snapshot: Callable[..., Snapshot],
) -> Golden:
    case = make_case()
    return make_golden(case, make_trace(case), make_snapshot())


def as_sketch(golden: Golden, rows: np.ndarray[Any, Any], ids: tuple[int, ...]) -> tuple[Golden, dict[str, Tensor]]:
    """The same golden as it would be committed of these rows if they were large."""
    tensors = {logits_name(step): Tensor.of(row[None].astype("<f4")) for step, row in enumerate(rows)}
    entries = tuple(TensorEntry(name=n, dtype=t.dtype, shape=t.shape, digest=t.digest) for n, t in tensors.items())
    trace = Trace(tensors={**tensors, TOKEN_IDS: Tensor.of(np.array(ids, dtype="<i4"))})
    small = replace(golden, form="sketch", entries=entries, token_ids=ids, tensors=sketch(trace, len(rows)), side={})
    return small, tensors


def test_entropy_and_surprisal_of_full_rows_are_those_of_the_distribution(golden: Golden) -> None:
    view = GoldenView.of(golden)

    assert view.exact
    for step, seen in enumerate(view.steps):
        logits = golden.tensors[logits_name(step)].values()[0]
        p = np.exp(logits) / np.exp(logits).sum()
        assert seen.entropy_low == seen.entropy_high == pytest.approx(-(p * np.log(p)).sum())
        assert seen.surprisal == pytest.approx(-math.log(p[golden.token_ids[step]]))
        assert seen.top[0].token_id == int(logits.argmax())
    assert view.perplexity == pytest.approx(math.exp(np.mean([step.surprisal for step in view.steps])))


@given(rows=arrays.arrays(np.float32, (3, 300), elements=st.floats(-30, 30, width=32)), token=st.integers(0, 299))
def test_of_a_sketch_the_interval_holds_the_true_entropy(rows: Any, token: int) -> None:
    small, tensors = as_sketch(SKETCHED[0], rows, (token, 0, 1))

    rough, exact = GoldenView.of(small, {}), GoldenView.of(small, tensors)

    assert (rough.exact, exact.exact) == (False, True)
    for seen, true in zip(rough.steps, exact.steps, strict=True):
        assert seen.entropy_low - 1e-12 <= true.entropy_low <= seen.entropy_high + 1e-12
        assert seen.surprisal is None or seen.surprisal == pytest.approx(true.surprisal, abs=1e-4)
        assert [one.token_id for one in seen.top] == [one.token_id for one in true.top]


SKETCHED: list[Golden] = []


@pytest.fixture(autouse=True)
def _sketched(golden: Golden) -> None:
    SKETCHED[:] = [golden]  # hypothesis takes no function-scoped fixture


def test_an_id_that_the_sketch_does_not_hold_has_no_surprisal(golden: Golden) -> None:
    rows = np.tile(np.linspace(5, -5, 600, dtype="<f4"), (3, 1))
    small, _ = as_sketch(golden, rows, (0, 599, 597))

    view = GoldenView.of(small, {})

    assert [step.surprisal is None for step in view.steps] == [False, True, False], "top, nowhere, on a stride"
    assert view.perplexity is None


def test_a_golden_of_draws_alone_has_no_rows_to_look_at(golden: Golden) -> None:
    view = GoldenView.of(replace(golden, form="draws"), {})

    assert view.steps == ()
    assert view.perplexity is None


def test_rows_of_a_full_golden_are_its_own_in_execution_order(golden: Golden) -> None:
    shuffled = replace(golden, tensors=dict(reversed(golden.tensors.items())))

    assert list(rows_at_hand(shuffled).items()) == [(name, golden.tensors[name]) for name in golden.digests]


def test_what_a_sketch_does_not_commit_is_not_at_hand_on_a_bare_machine(golden: Golden) -> None:
    assert rows_at_hand(replace(golden, form="sketch")) == {}
