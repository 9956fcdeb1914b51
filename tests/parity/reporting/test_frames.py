from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from parity.case import Case
from parity.compare import TensorDiff
from parity.distribution import kl_divergence
from parity.golden import Golden
from parity.golden_view import GoldenView
from parity.reporting.frames import difference_frame, golden_frame, row_frame
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import Trace

MODULES = ("model.layers.0", "lm_head")


@pytest.fixture
def trace(make_case: Callable[..., Case], make_trace: Callable[..., Trace]) -> Trace:
    return make_trace(make_case(), modules=MODULES)


def test_a_golden_is_a_row_a_step(
    make_case: Callable[..., Case],
    trace: Trace,
    make_golden: Callable[..., Golden],
    make_snapshot: Callable[..., Snapshot],
) -> None:
    view = GoldenView.of(make_golden(make_case(), trace, make_snapshot()))

    frame = golden_frame(view, lambda ids: f"<{ids[0]}>")

    assert list(frame.index) == [0, 1, 2]
    assert list(frame["token_id"]) == list(trace.token_ids)
    assert list(frame["text"]) == [f"<{token}>" for token in trace.token_ids]
    assert list(frame["surprisal"]) == [step.surprisal for step in view.steps]
    assert "text" not in golden_frame(view)


def test_a_row_is_its_likeliest_ids(trace: Trace) -> None:
    row = trace.logits(0)

    frame = row_frame(row, 16, lambda ids: str(ids[0]))

    assert frame["probability"].sum() == pytest.approx(1)
    assert frame["logprob"].is_monotonic_decreasing
    assert int(frame.index[0]) == int(row.values().argmax())
    assert list(frame["text"]) == [str(i) for i in frame.index]


def test_traces_of_the_same_bits_differ_nowhere(trace: Trace) -> None:
    frame = difference_frame(trace.tensors, trace.tensors)

    assert set(frame["match"]) == {"IDENTICAL"}
    assert frame["max_ulp"].dropna().sum() == 0
    assert list(frame.index) == list(trace.tensors)


def test_a_difference_is_described_where_it_is(trace: Trace, flip: Callable[..., Tensor]) -> None:
    name = "logits/1"
    changed = replace(trace, tensors={**trace.tensors, name: flip(trace.tensors[name], 3, 20)})

    frame = difference_frame(trace.tensors, changed.tensors)

    assert list(frame.index[frame["match"] == "DIFFERENT"]) == [name]
    assert frame.loc[name, "different"] == 1 / 16
    assert frame.loc[name, "max_ulp"] == TensorDiff.of(trace.tensors[name], changed.tensors[name]).max_ulp
    assert frame.loc[name, "kl"] == kl_divergence(trace.tensors[name], changed.tensors[name])
    assert 0 < frame.loc[name, "rms"] < 1
    assert frame.loc["activations/1/lm_head", ["kind", "step", "module"]].tolist() == ["activations", 1, "lm_head"]


def test_what_cannot_be_compared_has_no_figures(trace: Trace) -> None:
    wide = replace(trace, tensors={**trace.tensors, "logits/0": Tensor.of(np.zeros((1, 16)))})

    row = difference_frame(trace.tensors, wide.tensors).loc["logits/0"]

    assert row["match"] == "INCOMPARABLE"
    assert row[["different", "rms", "kl"]].isna().all()


def test_only_what_both_have_is_compared(trace: Trace) -> None:
    less = {name: tensor for name, tensor in trace.tensors.items() if name != "logits/2"}

    assert "logits/2" not in difference_frame(trace.tensors, less).index
