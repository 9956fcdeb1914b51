"""Kernels go into a model only where they give its bits; otherwise it stays as it was, and says so once."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.generate import forced, steps
from engine.kernels.driver import Driver, Form
from engine.kernels.experts import FastExperts
from engine.kernels.level import Kernels, Layer, forms, mapped
from engine.kernels.matrix import FastMatrix
from engine.linear import Embedding
from engine.model import CausalModel, open_model
from parity.models.fetch import ensure_snapshot

Llama = Callable[..., CausalModel]
IDS = (5, 17, 2, 90, 44, 3, 8)
FAMILIES = ("qwen2-tiny", "qwen3-q4g64-tiny", "gemma2-mixed-tiny", "phi3-tiny", "qwen3_moe-q4g64-tiny", "mamba2-tiny")


@pytest.fixture
def make(tmp_path: Path, driver: Callable[[Form], Driver]) -> Callable[..., Kernels]:
    def kernels(said: list[str] | None = None, wrong: Callable[[Driver], Driver] = lambda d: d) -> Kernels:
        return Kernels(
            folder=tmp_path,
            say=[].append if said is None else said.append,
            level="linear",
            threads=2,
            compile=lambda form, _: wrong(driver(form)),
        )

    return kernels


def rows(model: CausalModel) -> list[mx.array]:
    return [step.logits_BV for step in steps(model, IDS, num_steps=4, pick=forced((1, 2, 3, 4)))]


def fast_weights(value: Any) -> list[FastMatrix | FastExperts]:
    found: list[FastMatrix | FastExperts] = []

    def note(layer: Layer) -> Layer:
        weight = layer.head if isinstance(layer, Embedding) else layer.weight
        found.extend([weight] if isinstance(weight, FastMatrix | FastExperts) else [])
        return layer

    mapped(value, note)
    return found


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_model_on_kernels_gives_the_bits_of_the_plain_one(
    dtype: str, make: Callable[..., Kernels], llama: Llama, same_bits: Callable[[Any, Any], None]
) -> None:
    plain, kernels = llama(dtype), make()
    fast = kernels.put_into(plain, name=None)
    assert kernels.used == "linear"
    assert len(fast_weights(fast)) == 7 * 2 + 1
    assert not fast_weights(plain)
    for expected, actual in zip(rows(plain), rows(fast), strict=True):
        same_bits(expected, actual)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_family_runs_on_kernels(
    name: str, make: Callable[..., Kernels], same_bits: Callable[[Any, Any], None]
) -> None:
    folder, kernels = ensure_snapshot(name).path, make()
    fast = kernels.put_into(open_model(folder, dtype="f32"), name=None)
    assert kernels.used == "linear"
    assert any(isinstance(weight, FastExperts) for weight in fast_weights(fast)) == ("moe" in name)
    assert any(isinstance(weight, FastMatrix) for weight in fast_weights(fast))
    for expected, actual in zip(rows(open_model(folder, dtype="f32")), rows(fast), strict=True):
        same_bits(expected, actual)


def test_a_wrong_kernel_leaves_the_model_plain_and_says_so_once(
    make: Callable[..., Kernels], llama: Llama, flipping: Callable[..., Driver], same_bits: Callable[[Any, Any], None]
) -> None:
    said: list[str] = []
    plain, kernels = llama("bf16"), make(said, flipping)
    for _ in range(2):
        model = kernels.put_into(plain, name=None)
        assert model is plain
    assert kernels.used == "plain (kernel dense-bf16 does not give mlx's bits here)"
    assert len(said) == 1
    assert said[0].splitlines()[0] == "kernel dense-bf16 does not give mlx's bits here"
    assert said[0].splitlines()[-2:] == [
        "  instead  plain mlx operations",
        "  next     report it; ASSAY_KERNELS=plain computes the same without kernels and without this message",
    ]
    for expected, actual in zip(rows(plain), rows(model), strict=True):
        same_bits(expected, actual)


def test_a_model_that_goes_wrong_on_proven_kernels_stays_plain(
    make: Callable[..., Kernels], llama: Llama, flipping: Callable[..., Driver]
) -> None:
    make().put_into(llama(), name=None)  # proves the kernels
    said: list[str] = []
    kernels = make(said, flipping)
    assert kernels.put_into(llama(), name=None) is llama()
    assert kernels.used == "plain (the model on kernels does not give its own bits here)"
    assert [message.splitlines() for message in said] == [
        [
            "the model on kernels does not give its own bits here",
            "  step     0 of 2",
            "  instead  plain mlx operations",
            "  next     report it; ASSAY_KERNELS=plain computes the same without kernels and without this message",
        ]
    ]


def test_a_model_is_proved_once_under_its_name(
    make: Callable[..., Kernels], llama: Llama, flipping: Callable[..., Driver]
) -> None:
    make().put_into(llama(), name="one")
    assert make(None, flipping).put_into(llama(), name="one") is not llama()
    assert make(None, flipping).put_into(llama(), name="two") is llama()


def test_a_kernel_that_cannot_be_compiled_leaves_the_model_plain(tmp_path: Path, llama: Llama) -> None:
    def broken(_form: Form, _folder: Path) -> Driver:
        raise OSError("the disk is full")

    said: list[str] = []
    kernels = Kernels(folder=tmp_path, say=said.append, level="linear", compile=broken)
    assert kernels.put_into(llama(), name=None) is llama()
    assert kernels.used == "plain (kernel dense-bf16 cannot be used here)"
    assert [message.splitlines() for message in said] == [
        [
            "kernel dense-bf16 cannot be used here",
            "  reason   the disk is full",
            "  instead  plain mlx operations",
            "  next     report it; ASSAY_KERNELS=plain computes the same without kernels and without this message",
        ]
    ]


def test_nothing_is_replaced_on_a_gpu(
    make: Callable[..., Kernels], llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    model, kernels = llama(), make(said)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert kernels.put_into(model, name=None) is model
    assert kernels.put_into(model, name=None) is model
    assert kernels.used == "plain (the default device is a GPU)"
    assert [message.splitlines() for message in said] == [
        ["kernels are for the CPU; the default device is a GPU", "  instead  plain mlx operations"]
    ]


def test_float32_models_prove_the_two_byte_kernel_too(llama: Llama) -> None:
    assert forms(llama("f32")) == {Form(stored="f32"), Form(stored="bf16")}
    assert forms(llama("f16")) == {Form(stored="f16")}


def test_what_does_not_change_is_shared(make: Callable[..., Kernels], llama: Llama) -> None:
    plain: Any = llama()
    fast: Any = make().put_into(plain, name=None)
    assert fast.norm is plain.norm
    assert fast.config is plain.config
    assert fast.blocks[0].input_norm is plain.blocks[0].input_norm
    assert is_dataclass(fast)
    assert [f.name for f in fields(fast)] == [f.name for f in fields(plain)]
    assert (np.array(fast.embedding.weight) == np.array(plain.embedding.weight)).all()
