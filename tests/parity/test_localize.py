from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from parity.case import Case
from parity.localize import LOGITS, incomparable, localize, modules_of, operation_of
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, activation_name, logits_name

MODULES = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.0")


@pytest.fixture
def pair(make_case: Callable[..., Case], make_trace: Callable[..., Trace]) -> tuple[Trace, Trace]:
    case = make_case()
    return make_trace(case, modules=MODULES), make_trace(case, modules=MODULES)


def changed(trace: Trace, flip: Callable[..., Tensor], *names: str) -> Trace:
    return replace(trace, tensors={n: flip(t) if n in names else t for n, t in trace.tensors.items()})


def test_equal_traces_have_no_place(pair: tuple[Trace, Trace]) -> None:
    assert localize(*pair) is None


def test_the_first_module_of_the_first_step_that_differs_is_the_place(
    pair: tuple[Trace, Trace], flip: Callable[..., Tensor]
) -> None:
    expected, actual = pair
    names = (activation_name(1, MODULES[2]), activation_name(1, MODULES[3]), logits_name(1), logits_name(2))
    place = localize(expected, changed(actual, flip, *names))
    assert place is not None
    assert (place.step, place.module, place.before) == (1, MODULES[2], MODULES[:2])
    assert place.inputs_identical
    assert place.diff is not None
    assert place.diff.num_different == 1
    assert place.operation.startswith("between the projections and this one: rotation")


def test_the_expected_order_decides_not_that_of_the_other_side(
    pair: tuple[Trace, Trace], flip: Callable[..., Tensor]
) -> None:
    expected, actual = pair
    wrong = changed(actual, flip, activation_name(0, MODULES[1]), activation_name(0, MODULES[3]))
    other = replace(wrong, tensors=dict(reversed(wrong.tensors.items())))
    place = localize(expected, other)
    assert place is not None
    assert place.module == MODULES[1]


def test_a_row_that_differs_behind_equal_modules_is_the_heads(
    pair: tuple[Trace, Trace], flip: Callable[..., Tensor]
) -> None:
    expected, actual = pair
    place = localize(expected, changed(actual, flip, logits_name(0)))
    assert place is not None
    assert (place.module, place.before) == (LOGITS, MODULES[1:])


def test_the_very_first_module_has_no_inputs_that_agree(pair: tuple[Trace, Trace], flip: Callable[..., Tensor]) -> None:
    expected, actual = pair
    place = localize(expected, changed(actual, flip, activation_name(0, MODULES[0])))
    assert place is not None
    assert (place.before, place.inputs_identical) == ((), False)


def test_an_id_that_differs_comes_before_the_step_that_it_leads_astray(
    pair: tuple[Trace, Trace], flip: Callable[..., Tensor]
) -> None:
    expected, actual = pair
    ids = Tensor.of(np.array([actual.token_ids[0] ^ 1, *actual.token_ids[1:]], dtype="<i4"))
    wrong = changed(actual, flip, activation_name(1, MODULES[0]), logits_name(1))
    place = localize(expected, replace(wrong, tensors={**wrong.tensors, TOKEN_IDS: ids}))
    assert place is not None
    assert (place.step, place.module, place.diff) == (0, TOKEN_IDS, None)


@pytest.mark.parametrize(("drop", "side"), [("actual", "expected"), ("expected", "actual")])
def test_a_module_that_one_side_alone_has_is_a_place(pair: tuple[Trace, Trace], drop: str, side: str) -> None:
    sides = dict(zip(("expected", "actual"), pair, strict=True))
    gone = activation_name(0, MODULES[1])
    sides[drop] = replace(sides[drop], tensors={n: t for n, t in sides[drop].tensors.items() if n != gone})
    place = localize(sides["expected"], sides["actual"])
    assert place is not None
    assert (place.module, place.only_on) == (MODULES[1], side)
    assert incomparable(place)


def test_heads_are_named_where_the_output_is_laid_out_by_them(
    pair: tuple[Trace, Trace], flip: Callable[..., Tensor]
) -> None:
    expected, actual = pair
    name = activation_name(0, MODULES[1])
    wrong = replace(actual, tensors={**actual.tensors, name: flip(actual.tensors[name], element=3)})
    place = localize(expected, wrong, head_width=2)
    assert place is not None
    assert place.heads == (1,)
    assert localize(expected, wrong) == replace(place, heads=())


def test_the_modules_of_a_step_keep_their_order(pair: tuple[Trace, Trace]) -> None:
    assert modules_of(pair[0], 2) == MODULES


@pytest.mark.parametrize(
    ("module", "begins"),
    [
        ("model.embed_tokens", "the rows of the embedding"),
        ("model.layers.3.self_attn.q_norm", "the norm of each head"),
        ("model.layers.3.post_attention_layernorm", "the norm (eps"),
        ("backbone.norm_f", "the norm (eps"),
        ("model.layers.0.self_attn.k_proj", "the product with its weight"),
        ("model.layers.0.linear_attn.out_proj", "the recurrence"),
        ("model.layers.0.linear_attn.conv1d", "the convolution"),
        ("model.layers.0.mlp.gate", "the router"),
        ("model.layers.0.mlp.gate_proj", "the product with its weight"),
        ("model.layers.0.mlp.switch_mlp", "the experts"),
        ("model.layers.0.mlp.down_proj", "the activation between"),
        ("model.layers.0.mlp", "the weights of the chosen experts"),
        ("model.layers.12", "the sums of the residual stream"),
        ("lm_head", "the product of the head"),
        (LOGITS, "the head, or what follows it"),
        ("model.altup", "what this module computes"),
    ],
)
def test_what_a_module_computes_is_said_in_words(module: str, begins: str) -> None:
    assert operation_of(module).startswith(begins)
