"""What a sampler case asks: read, written, refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parity.case import Case
from parity.errors import CaseError
from parity.sampled_trace import UNIFORMS, XTC_UNIFORMS, sampled_trace
from parity.sampling import Sampling, read_options
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS

OPTIONS = {
    "temperature": 0.7,
    "top_k": 40,
    "xtc_probability": 0.5,
    "xtc_special": [3, 7],
    "logit_bias": {"5": 1, "6": -0.5},
}


def sampling(**changes: Any) -> Sampling:
    fields = {"chain": "mlx-lm", "options": read_options(OPTIONS), "rows": "ties", "num_rows": 4, "batch": 3, "seed": 0}
    return Sampling(**{**fields, **changes})


def test_a_sampler_case_survives_json(make_case: Callable[..., Case]) -> None:
    case = replace(make_case(), sampling=sampling(), num_steps=100)
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert (case.num_rows, case.num_ids) == (4, 300)
    assert hash(case) == hash(replace(case))


def test_a_case_without_sampling_is_written_as_before(make_case: Callable[..., Case]) -> None:
    assert {"sampling", "full_rows"}.isdisjoint(make_case().to_json())
    assert (make_case().num_rows, make_case().num_ids) == (make_case().num_steps, make_case().num_steps)
    assert replace(make_case(), full_rows=True).to_json()["full_rows"] is True


def test_options_keep_their_kinds() -> None:
    assert sampling().named == {
        "temperature": 0.7,
        "top_k": 40,
        "xtc_probability": 0.5,
        "xtc_special": (3, 7),
        "logit_bias": {5: 1.0, 6: -0.5},
    }


@pytest.mark.parametrize(
    ("options", "greedy", "xtc"),
    [({}, True, False), ({"temperature": 0, "xtc_probability": 1}, True, False), ({"temperature": 1}, False, False)],
)
def test_what_is_random_follows_from_the_options(options: dict[str, Any], greedy: bool, xtc: bool) -> None:
    asked = sampling(options=read_options(options))
    assert (asked.greedy, asked.xtc) == (greedy, xtc)
    assert sampling().xtc


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"temprature": 1.0}, "unknown option 'temprature'"),
        ({"temperature": "hot"}, "unknown temperature 'hot'"),
        ({"top_k": 2.5}, "unknown top_k 2.5"),
        ({"top_k": True}, "unknown top_k True"),
        ({"xtc_special": ["a"]}, "unknown xtc_special ['a']"),
        ({"logit_bias": {"x": 1}}, "unknown logit_bias {'x': 1}"),
        ({"logit_bias": [1]}, "unknown logit_bias [1]"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(CaseError, match=r"\n  next +") as refused:
        read_options(options)
    assert refused.value.what == what


@pytest.mark.parametrize("change", [{"chain": "other"}, {"batch": 0}, {"num_rows": 0}, {"seed": -1}, {"seed": True}])
def test_a_manifest_with_other_values_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CaseError, match="unknown"):
        Sampling.from_json({**sampling().to_json(), **change})


def test_a_trace_holds_rows_uniforms_and_ids_in_this_order() -> None:
    row = Tensor.of(np.zeros((1, 8), np.float32))
    ids = np.array([[1, 2], [3, 4]])
    trace = sampled_trace([row, row], ids, uniforms=np.zeros((2, 2), np.float32), xtc_uniforms=np.zeros(2, np.float32))
    assert list(trace.tensors) == ["logits/0", "logits/1", UNIFORMS, XTC_UNIFORMS, TOKEN_IDS]
    assert trace.token_ids == (1, 2, 3, 4)
    assert list(sampled_trace([row], ids, uniforms=None, xtc_uniforms=None).tensors) == ["logits/0", TOKEN_IDS]
