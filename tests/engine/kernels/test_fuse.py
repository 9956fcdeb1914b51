"""What is wrong, or has no fused step, stays on fast products, and the reason is told."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.generate import steps
from engine.kernels.fused import FusedModel
from engine.kernels.step import StepCode
from engine.model import open_model
from parity.models.fetch import ensure_snapshot

Same = Callable[[Any, Any], None]


def test_a_wrong_step_leaves_the_model_on_fast_products_and_says_so_once(
    make_kernels: Any, llama: Any, wrong_step: Callable[..., StepCode], same_bits: Same
) -> None:
    said: list[str] = []
    kernels = make_kernels(said, wrong_step())
    for _ in range(2):
        fast = kernels.put_into(llama(), name=None)
        assert not isinstance(fast, FusedModel)
    assert kernels.used == "linear (the norm of the fused step does not give mlx's bits here)"
    assert len(said) == 1
    assert said[0].splitlines()[-2:] == [
        "  instead  fast products alone",
        "  next     report it; ASSAY_KERNELS=linear computes the same without the fused step and without this message",
    ]
    for right, found in zip(steps(llama(), [1, 2, 3], num_steps=3), steps(fast, [1, 2, 3], num_steps=3), strict=True):
        same_bits(right.logits_BV, found.logits_BV)


def test_a_model_that_goes_wrong_on_a_proven_step_stays_on_fast_products(
    make_kernels: Any, llama: Any, wrong_step: Callable[..., StepCode]
) -> None:
    assert isinstance(make_kernels().put_into(llama(), name="one"), FusedModel)  # proves the step
    said: list[str] = []
    kernels = make_kernels(said, wrong_step())
    assert isinstance(kernels.put_into(llama(), name="one"), FusedModel)  # what is on record is believed
    assert not isinstance(kernels.put_into(llama(), name="two"), FusedModel)
    assert kernels.used == "linear (the model on the fused step does not give its own bits here)"
    assert [message.splitlines() for message in said] == [
        [
            "the model on the fused step does not give its own bits here",
            "  step     1 of 3",
            "  instead  fast products alone",
            "  next     report it; ASSAY_KERNELS=linear computes the same without the fused step and without this message",
        ]
    ]


def test_a_step_that_cannot_be_compiled_leaves_fast_products(make_kernels: Any, llama: Any) -> None:
    def broken(_folder: object) -> StepCode:
        raise OSError("the disk is full")

    said: list[str] = []
    kernels = make_kernels(said)
    kernels.compile_step = broken
    kernels.put_into(llama(), name=None)
    assert kernels.used == "linear (the fused step cannot be used here)"
    assert said[0].splitlines()[:2] == ["the fused step cannot be used here", "  reason   the disk is full"]


def test_the_level_linear_has_no_fused_step(make_kernels: Any, llama: Any) -> None:
    kernels = make_kernels()
    kernels.level = "linear"
    assert not isinstance(kernels.put_into(llama(), name=None), FusedModel)
    assert kernels.used == "linear"


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("gemma3_text-mxfp4-tiny", "f32", "no fused step: an embedding of another dtype than the norms"),
        ("mamba2-tiny", "f32", "no fused step: the family mamba2 has none"),
        ("llama_default-mxfp4-tiny", "f32", "no fused step: an embedding of another dtype than the norms"),
        ("gemma3_text-tiny", "f16", "no fused step: a residual stream that is held inside float16"),
        ("cohere2-tiny", "f16", "no fused step: attention in float32 inside float16"),
        ("mistral3-tiny", "f32", "no fused step: attention of the kind Attention"),
    ],
)
def test_what_has_no_fused_step_says_why_and_runs_on_fast_products(
    name: str, dtype: Any, reason: str, make_kernels: Any
) -> None:
    said: list[str] = []
    kernels = make_kernels(said)
    model = kernels.put_into(open_model(ensure_snapshot(name).path, dtype=dtype), name=None)
    assert not isinstance(model, FusedModel)
    assert (kernels.used, kernels.not_fused, said) == (f"linear ({reason})", reason, [])
    kernels.put_into(open_model(ensure_snapshot("llama-tiny").path, dtype="f32"), name=None)
    assert kernels.used == "fused"
