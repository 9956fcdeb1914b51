"""`python -m engine.kernels.prove` names every kernel, and fails where one of them is wrong."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.kernels import prove as prove_module
from engine.kernels.driver import Driver, Form
from engine.kernels.prove import FORMS, prove
from tests.engine.kernels import conftest


def test_a_right_kernel_is_identical(driver: Callable[[Form], Driver]) -> None:
    said: list[str] = []
    assert prove(["packed-4-f32"], say=said.append, compile_form=lambda form, _: driver(form)) == 0
    assert said == ["packed-4-f32: IDENTICAL"]


def test_a_wrong_kernel_is_told_and_fails(driver: Callable[[Form], Driver], flipping: Callable[..., Driver]) -> None:
    said: list[str] = []
    assert prove(["dense-f32"], say=said.append, compile_form=lambda form, _: flipping(driver(form))) == 1
    assert said[0].startswith("dense-f32: kernel dense-f32 does not give mlx's bits here\n")


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    never: Any = None
    assert prove(["dense-f64"], say=said.append, compile_form=never) == 2
    assert said[0].startswith("unknown kernels: dense-f64\n  known  dense-f32, packed-2-f32, ")
    assert said[0].endswith(", fused-step")
    assert capsys.readouterr().out == ""


def test_every_form_is_there() -> None:
    assert set(FORMS) == set(conftest.FORMS)


def test_float16_is_left_out_where_the_processor_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    never: Any = None
    monkeypatch.setattr(prove_module, "has_half_precision", lambda: False)
    assert prove(["dense-f16"], say=said.append, compile_form=never) == 0
    assert said == ["dense-f16: left out, this processor converts no float16"]
