"""Feed-forward layers without a gate, alone and as experts: stacked or one by one, in the model's space or a narrower one."""

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import numpy as np
import pytest

from engine.activation import relu2
from engine.checkpoint import Checkpoint
from engine.moe import SORTED_FROM
from engine.quantization import Quantization
from engine.router import Choice
from engine.taps import watching
from engine.ungated_moe import UngatedMoE

Check = Callable[..., None]
Normal = Callable[..., mx.array]
X, D, F, S = 4, 16, 8, 12
CHOICE = Choice(experts=X, chosen=2, factor=2.5, floor=1e-20)


@pytest.fixture
def layer(tmp_path: Path, normal: Normal) -> Callable[..., UngatedMoE]:
    def make(*, latent: int | None = None, hub: bool = False, shared: bool = True, bias: bool = False) -> UngatedMoE:
        space = latent or D
        up, down = normal(1, (X, F, space)) / 4, normal(2, (X, space, F)) / 4
        tensors = {"m.gate.weight": normal(3, (X, D)), "m.gate.e_score_correction_bias": normal(4, (X,)) / 9}
        if hub:
            tensors |= {f"m.experts.{i}.up_proj.weight": up[i] for i in range(X)}
            tensors |= {f"m.experts.{i}.down_proj.weight": down[i] for i in range(X)}
        else:
            tensors |= {"m.switch_mlp.fc1.weight": up, "m.switch_mlp.fc2.weight": down}
        projections = {}
        if shared:
            projections |= {"shared_experts.up_proj": (S, D), "shared_experts.down_proj": (D, S)}
        if latent:
            projections |= {"fc1_latent_proj": (latent, D), "fc2_latent_proj": (D, latent)}
        for seed, (name, shape) in enumerate(projections.items()):
            tensors[f"m.{name}.weight"] = normal(10 + seed, shape) / 4
            if bias:
                tensors[f"m.{name}.bias"] = normal(20 + seed, shape[:1])
        folder = Path(mkdtemp(dir=tmp_path))  # arrays are read when they are needed: one folder a layer
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        checkpoint = Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization())
        taken = UngatedMoE.take(
            checkpoint,
            "m",
            width=D,
            latent=latent,
            inner=F,
            shared_inner=S if shared else None,
            choice=CHOICE,
            bias=bias,
        )
        checkpoint.finish(dropped={})
        return taken

    return make


def test_relu2_squares_what_is_above_zero(same_bits: Check) -> None:
    same_bits(mx.array([0.0, 0.0, 0.25, 9.0]), relu2(mx.array([-2.0, 0.0, 0.5, 3.0])))


@pytest.mark.parametrize("latent", [None, 8])
def test_experts_one_by_one_are_the_stacked_ones(
    layer: Callable[..., UngatedMoE], normal: Normal, same_bits: Check, latent: int | None
) -> None:
    x = normal(0, (1, 5, D))
    same_bits(layer(latent=latent)(x), layer(latent=latent, hub=True)(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("latent", [None, 8])
@pytest.mark.parametrize("tokens", [3, SORTED_FROM])
def test_it_is_its_parts(
    layer: Callable[..., UngatedMoE], normal: Normal, *, latent: int | None, tokens: int, bias: bool
) -> None:
    module, x = layer(latent=latent, bias=bias), normal(0, (1, tokens, D))
    y = np.array(module(x))[0]
    experts, weights = (np.array(array)[0] for array in module.router(x))
    assert module.shared is not None
    shared = np.array(module.shared(x))[0]
    up, down = np.array(module.experts.up.weight), np.array(module.experts.down.weight)
    narrowed = np.array(x if module.narrow is None else module.narrow(x))[0]
    for token in range(tokens):
        mixed = sum(
            weight * (down[expert] @ np.maximum(up[expert] @ narrowed[token], 0) ** 2)
            for expert, weight in zip(experts[token], weights[token], strict=True)
        )
        wide = mx.array(mixed)[None, None]
        routed = np.array(wide if module.widen is None else module.widen(wide))[0, 0]
        assert np.abs(routed + shared[token] - y[token]).max() < 1e-4


def test_without_a_common_layer_the_experts_are_all(
    layer: Callable[..., UngatedMoE], normal: Normal, other_bits: Check
) -> None:
    x = normal(0, (1, 3, D))
    other_bits(layer()(x), layer(shared=False)(x))


def test_every_module_shows_its_output(layer: Callable[..., UngatedMoE], normal: Normal) -> None:
    seen: dict[str, mx.array] = {}
    with watching(seen.__setitem__):
        layer(latent=8)(normal(0, (1, 3, D)))
    assert list(seen) == [
        "m.gate",
        "m.fc1_latent_proj",
        "m.switch_mlp",
        "m.fc2_latent_proj",
        "m.shared_experts.up_proj",
        "m.shared_experts.down_proj",
        "m.shared_experts",
        "m",
    ]
