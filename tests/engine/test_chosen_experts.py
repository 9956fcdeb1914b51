"""Experts chosen by the largest logits against a loop over tokens."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine.activation import swiglu
from engine.chosen_experts import ChosenExperts
from engine.linear import Linear
from engine.moe import ExpertLinear, GatedExperts
from engine.taps import watching

Check = Callable[..., None]
Normal = Callable[..., mx.array]
X, D, F = 6, 16, 8


@pytest.fixture
def layer(normal: Normal) -> ChosenExperts:
    gate, up = (ExpertLinear(weight=normal(seed, (X, F, D)) / 4) for seed in (1, 2))
    down = ExpertLinear(weight=normal(3, (X, D, F)) / 4)
    return ChosenExperts(
        path="m",
        router=Linear(path="m.router.layer", weight=normal(0, (X, D))),
        chosen=2,
        experts=GatedExperts(path="m.switch_mlp", gate=gate, up=up, down=down, activation=swiglu),
    )


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_it_is_the_two_likeliest_weighed_by_their_own_softmax(
    layer: ChosenExperts, normal: Normal, tokens: int
) -> None:
    x = normal(5, (1, tokens, D))
    logits = np.array(layer.router(x))[0].astype(np.float64)
    y = np.array(layer(x))[0]
    for token in range(tokens):
        best = np.argsort(logits[token])[-2:]
        weights = np.exp(logits[token][best]) / np.exp(logits[token][best]).sum()
        outputs = np.array(layer.experts(x[:, token : token + 1], mx.array([[best.tolist()]])))[0, 0]
        assert np.abs(weights @ outputs - y[token]).max() < 1e-5


def test_one_expert_counts_in_full(layer: ChosenExperts, normal: Normal, same_bits: Check) -> None:
    x = normal(5, (1, 3, D))
    best = mx.argmax(layer.router(x), axis=-1, keepdims=True)
    same_bits(layer.experts(x, best)[:, :, 0], replace(layer, chosen=1)(x))


def test_every_module_shows_its_output_and_the_router_the_ids_that_it_chose(
    layer: ChosenExperts, normal: Normal, same_bits: Check
) -> None:
    seen: dict[str, mx.array] = {}
    with watching(seen.__setitem__):
        layer(normal(5, (1, 3, D)))
    assert list(seen) == ["m.router.layer", "m.router", "m.switch_mlp", "m"]
    same_bits(mx.argpartition(seen["m.router.layer"], kth=-2, axis=-1)[..., -2:], seen["m.router"])
