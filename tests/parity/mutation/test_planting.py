from dataclasses import replace
from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest

from engine import norm
from engine.cache.plain import PlainCache
from engine.norm import RMSNorm
from parity import engine_runner
from parity.models.fetch import ensure_snapshot
from parity.mutation.planting import NoChangeError, edit, same, swap


def opened() -> Any:
    return engine_runner.open_model(ensure_snapshot("llama-tiny").path, dtype="f32")


def test_an_edit_is_in_the_models_opened_while_it_is_planted_and_in_no_other() -> None:
    before, right = opened(), engine_runner.open_model
    with edit("blocks.1.post_norm.eps", lambda eps: eps * 2).planted() as acted:
        during = opened()
        assert acted.times == 1
    after = opened()

    assert engine_runner.open_model is right
    assert [m.blocks[1].post_norm.eps for m in (before, during, after)] == [1e-6, 2e-6, 1e-6]
    assert during.blocks[0].post_norm.eps == 1e-6


def test_an_edit_of_the_model_itself_needs_no_path_before_the_field() -> None:
    with edit("head", lambda _: None).planted():
        assert opened().head is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("blocks.1.post_norm.epsilon", "no field epsilon at blocks.1.post_norm"),
        ("blocks.9.post_norm.eps", "no 9 at blocks.9.post_norm"),
        ("blocks.1.postnorm.eps", "no field postnorm at blocks.1.postnorm"),
    ],
)
def test_an_edit_of_what_is_not_there_is_refused(path: str, message: str) -> None:
    with edit(path, lambda _: 0.0).planted(), pytest.raises(NoChangeError, match=f"^{message}$"):
        opened()


def test_an_edit_that_changes_no_bit_is_refused() -> None:
    message = r"^blocks\.0\.input_norm\.weight is changed to what it is$"
    with edit("blocks.0.input_norm.weight", lambda w: w + 0.0).planted(), pytest.raises(NoChangeError, match=message):
        opened()


def test_a_replacement_counts_its_calls_and_goes_whatever_happens() -> None:
    right = vars(RMSNorm)["__call__"]
    layer, ones = RMSNorm(path="p", weight=None, eps=1e-6), mx.ones((1, 4))

    def interrupted() -> None:
        with swap("engine.norm:RMSNorm.__call__", lambda right: lambda self, x: right(self, x) * 2).planted() as acted:
            assert layer(ones)[0, 0].item() > 1.5
            assert acted.times == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert vars(RMSNorm)["__call__"] is right
    assert layer(ones)[0, 0].item() < 1.5


def test_a_replaced_method_is_the_one_that_is_called() -> None:
    keys = mx.ones((1, 1, 2, 4))
    with swap(
        "engine.cache.plain:PlainCache.append",
        lambda right: lambda self, k, v: (replace(right(self, k, v)[0], offset=7), k, v),
    ).planted():
        assert PlainCache().append(keys, keys)[0].offset == 7
    assert PlainCache().append(keys, keys)[0].offset == 2


def test_a_function_is_replaced_where_it_is_looked_up_and_not_where_it_is_defined() -> None:
    activation = import_module("engine.activation")
    with swap("engine.norm:swiglu", lambda _: lambda gate, up: gate).planted():  # noqa: ARG005
        assert norm.swiglu is not activation.swiglu
    assert norm.swiglu is activation.swiglu


def test_a_constant_that_is_replaced_has_acted() -> None:
    module = import_module("engine.gated_delta")
    with swap("engine.gated_delta:UNIT_EPS", lambda eps: eps * 2).planted() as acted:
        assert (acted.times, module.UNIT_EPS) == (1, 2e-6)
    assert module.UNIT_EPS == 1e-6


@pytest.mark.parametrize("target", ["engine.norm:silu2", "engine.norm:RMSNorm.normalise"])
def test_a_replacement_of_what_is_not_there_is_refused(target: str) -> None:
    with pytest.raises(NoChangeError, match=f"^{target} does not exist$"):
        swap(target, lambda right: right).planted().__enter__()


def test_a_constant_replaced_by_itself_is_refused() -> None:
    with (
        pytest.raises(NoChangeError, match=r"^engine\.gated_delta:UNIT_EPS is changed to what it is$"),
        swap("engine.gated_delta:UNIT_EPS", lambda eps: eps).planted(),
    ):
        pass


@pytest.mark.parametrize(
    ("one", "two", "alike"),
    [
        (mx.array([0.0]), mx.array([0.0]), True),
        (mx.array([0.0]), mx.array([-0.0]), False),
        (mx.array([float("nan")]), mx.array([float("nan")]), True),
        (mx.array([1.0]), mx.array([[1.0]]), False),
        (mx.array([1.0]), mx.array([1.0], mx.bfloat16), False),
        (mx.array([1], mx.uint8), mx.array([1], mx.uint8), True),
        (mx.array([1.0]), None, False),
        (1e-6, 1e-6, True),
        (1e-6, 1e-5, False),
        (None, None, True),
    ],
)
def test_values_are_alike_to_the_bit(one: object, two: object, *, alike: bool) -> None:
    assert same(one, two) is alike
