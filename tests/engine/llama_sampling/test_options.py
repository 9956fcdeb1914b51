"""Every message that a user of the samplers can meet."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.dry import DRY
from engine.llama_sampling.filters import MinP, TopK, TopNSigma, TopP, TypicalP
from engine.llama_sampling.generators import Mt19937
from engine.llama_sampling.mirostat import Mirostat, MirostatV2
from engine.llama_sampling.penalties import LogitBias, Penalties
from engine.llama_sampling.strategy import SamplingStrategy, sample_with_strategy
from engine.llama_sampling.strategy_table import strategy_of
from engine.llama_sampling.temperature import DynamicTemperature, Temperature
from engine.llama_sampling.xtc import XTC


def message(make: Callable[[], Any]) -> str:
    with pytest.raises(RequestError) as refused:
        make()
    return str(refused.value)


@pytest.mark.parametrize(
    ("make", "name", "given", "accepted"),
    [
        (lambda: TopP(-0.1), "top-p", "-0.1", "finite, at least 0"),
        (lambda: TopP(math.nan), "top-p", "nan", "finite, at least 0"),
        (lambda: TopP(0.5, -1), "min_keep", "-1", "whole numbers from 0"),
        (lambda: MinP(math.inf), "min-p", "inf", "finite numbers"),
        (lambda: MinP(0.1, -1), "min_keep", "-1", "whole numbers from 0"),
        (lambda: TypicalP(-1), "typical-p", "-1", "finite, at least 0"),
        (lambda: TypicalP(0.1, -1), "min_keep", "-1", "whole numbers from 0"),
        (lambda: TopK(2.5), "top-k", "2.5", "whole numbers from -2147483648"),  # type: ignore[arg-type]
        (lambda: TopNSigma(math.nan), "top-n-sigma", "nan", "finite numbers"),
        (lambda: Temperature(math.nan), "temperature", "nan", "finite numbers"),
        (lambda: DynamicTemperature(math.inf, 0, 1), "temperature", "inf", "finite numbers"),
        (lambda: DynamicTemperature(1, math.nan, 1), "dynamic temperature range", "nan", "finite numbers"),
        (lambda: DynamicTemperature(1, 0, -1), "dynamic temperature exponent", "-1", "finite, at least 0"),
        (lambda: XTC(1.5), "XTC probability", "1.5", "-inf to 1"),
        (lambda: XTC(0.5, math.nan), "XTC threshold", "nan", "finite numbers"),
        (lambda: XTC(0.5, 0.1, -1), "min_keep", "-1", "whole numbers from 0"),
        (lambda: Penalties(repeat=0), "repeat penalty", "0", "finite, at least 1.17549e-38"),
        (lambda: Penalties(frequency=math.nan), "frequency penalty", "nan", "finite numbers"),
        (lambda: Penalties(presence=math.inf), "presence penalty", "inf", "finite numbers"),
        (lambda: Penalties(last_n=-2), "penalty window", "-2", "whole numbers from -1"),
        (lambda: LogitBias({3: math.inf}), "logit bias of 3", "inf", "finite numbers"),
        (lambda: LogitBias({-3: 1.0}), "biased id", "-3", "whole numbers from 0"),
        (lambda: DRY(multiplier=math.nan), "DRY multiplier", "nan", "finite numbers"),
        (lambda: DRY(multiplier=1, base=math.inf), "DRY base", "inf", "finite numbers"),
        (lambda: DRY(multiplier=1, allowed_length=-1), "DRY allowed length", "-1", "whole numbers from 0"),
        (lambda: DRY(multiplier=1, last_n=-2), "DRY window", "-2", "whole numbers from -1"),
        (lambda: Mirostat(tau=-1), "mirostat tau", "-1", "finite, at least 0"),
        (lambda: Mirostat(m=1), "mirostat m", "1", "whole numbers from 2"),
        (lambda: MirostatV2(eta=-1), "mirostat eta", "-1", "finite, at least 0"),
        (lambda: MirostatV2(mu=math.nan), "mirostat mu", "nan", "finite numbers"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_range(
    make: Callable[[], Any], name: str, given: str, accepted: str
) -> None:
    assert message(make) == (
        f"{name} is out of range\n  given  {given}\n  range  {accepted}\n  next   choose another {name}"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinite_logits_are_refused_with_their_ids(value: float) -> None:
    row = np.zeros(9)
    row[[2, 5]] = value
    assert message(lambda: Candidates.from_logits(row)) == (
        "the logits hold NaN or +inf\n  ids    2, 5\n  count  2 of 9\n"
        "  next   find the forward that made them: assay explain CASE"
    )


def test_logits_that_leave_nothing_are_refused() -> None:
    expected = (
        "no token can be picked: every logit is -inf\n  candidates  3\n"
        "  next        loosen the mask, the bias or the penalties"
    )
    assert message(lambda: Candidates.from_logits([-np.inf] * 3)) == expected
    forbidden = SamplingStrategy(samplers=(LogitBias(dict.fromkeys(range(3), -math.inf)),))
    assert message(lambda: sample_with_strategy([1, 2, 3], params=forbidden, prng=Mt19937(0))) == expected


@pytest.mark.parametrize(("row", "shape"), [([[1.0, 2.0]], "[1, 2]"), ([], "[0]"), (1.0, "[]")])
def test_what_is_not_one_row_is_refused(row: Any, shape: str) -> None:
    assert message(lambda: Candidates.from_logits(row)) == (
        f"a sampler takes one row of logits\n  shape  {shape}\n  next   pass logits of shape [V]"
    )


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    params = SamplingStrategy(samplers=(LogitBias({1: 1.0, 7: 1.0}),))
    assert message(lambda: sample_with_strategy([1, 2, 3], params=params, prng=Mt19937(0))) == (
        "logit bias names ids outside the vocabulary\n  ids         7\n  vocabulary  0 to 2\n"
        "  next        tokenise with the tokenizer of this snapshot"
    )


@pytest.mark.parametrize(("breaker", "length"), [((), 0), (tuple(range(22)), 22)])
def test_a_breaker_that_is_empty_or_too_long_is_refused(breaker: tuple[int, ...], length: int) -> None:
    assert message(lambda: DRY(multiplier=1, breakers=(breaker,))) == (
        f"a DRY sequence breaker is empty or too long\n  tokens  {length}\n  range   1 to 21\n  next    shorten it"
    )


def test_an_unknown_sampler_names_the_near_ones() -> None:
    assert message(lambda: strategy_of([{"name": "topk", "k": 3}], {"name": "dist"})) == (
        "unknown sampler 'topk'\n  near  top_k, top_p, top_n_sigma\n  next  use one of these names"
    )


def test_options_that_do_not_fit_are_named() -> None:
    assert message(lambda: strategy_of([{"name": "top_k", "n": 3}], {"name": "dist"})) == (
        "the options of sampler 'top_k' do not fit\n  unknown  n\n  options  k\n  next     use these options"
    )
    assert message(lambda: strategy_of([{"name": "top_k"}], {"name": "dist"})) == (
        "the options of sampler 'top_k' do not fit\n  missing  k\n  options  k\n  next     use these options"
    )
