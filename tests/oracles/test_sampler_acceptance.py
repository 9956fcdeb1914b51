"""A trace of draws becomes a golden only if it answers the sampler case: rows, uniforms, one id a draw and element."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracles.acceptance import accept
from oracles.registry import Oracle
from parity.case import Case
from parity.errors import OracleError
from parity.logit_rows import generated_rows, rounded
from parity.provenance import Provenance
from parity.sampled_trace import UNIFORMS, XTC_UNIFORMS, sampled_trace
from parity.sampling import Sampling, read_options
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace
from tests.oracles.shop import make_case

OPTIONS = {"temperature": 1.0, "xtc_probability": 0.5}


def sampler_case(**options: Any) -> Case:
    asked = Sampling(chain="mlx-lm", options=read_options(options or OPTIONS), rows="ties", num_rows=2, batch=3, seed=0)
    return make_case(num_steps=5, sampling=asked, snapshot="no-model")


def trace_of(case: Case) -> Trace:
    assert case.sampling is not None
    random = not case.sampling.greedy
    return sampled_trace(
        rounded(generated_rows("ties", 2), case.dtype),
        np.zeros((5, 3), np.int32),
        uniforms=np.zeros((5, 3), np.float32) if random else None,
        xtc_uniforms=np.zeros(5, np.float32) if case.sampling.xtc else None,
    )


def provenance(oracle: Oracle) -> Provenance:
    return replace(Provenance.capture(("mlx",), device="cpu"), packages=dict(oracle.pins))


def changed(trace: Trace, **tensors: Tensor | None) -> Trace:
    return Trace(tensors={name: t for name, t in {**trace.tensors, **tensors}.items() if t is not None})


@pytest.mark.parametrize("options", [OPTIONS, {"temperature": 1.0}, {"temperature": 0.0}])
def test_a_complete_answer_is_accepted(oracle: Oracle, options: dict[str, float]) -> None:
    case = sampler_case(**options)
    accept(case, trace_of(case), provenance(oracle), oracle)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({UNIFORMS: None}, "uniforms {'xtc_uniforms': (5,)} where"),
        ({XTC_UNIFORMS: None}, "uniforms {'uniforms': (5, 3)} where"),
        ({UNIFORMS: Tensor.of(np.zeros((5, 1), np.float32))}, "'uniforms': (5, 1)"),
        ({TOKEN_IDS: Tensor.of(np.zeros(5, np.int32))}, "not one token id a step (15 steps)"),
        ({TOKEN_IDS: Tensor.of(np.full(15, 256, np.int32))}, "outside the 256 logits"),
        ({"logits/1": None}, "1 rows of logits for 2 steps"),
        ({"logits/1": Tensor.of(np.zeros((1, 256), np.float32))}, "its rows are not those that 'ties' names"),
    ],
)
def test_an_answer_that_lacks_something_is_refused(
    oracle: Oracle, change: dict[str, Tensor | None], reason: str
) -> None:
    case = sampler_case()
    with pytest.raises(OracleError, match="gave no usable trace") as refused:
        accept(case, changed(trace_of(case), **change), provenance(oracle), oracle)
    assert reason in str(refused.value.facts["reason"])
