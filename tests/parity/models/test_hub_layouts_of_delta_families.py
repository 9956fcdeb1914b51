"""Hub layouts of qwen3_next, qwen3_5 and qwen3_5_moe: names, shapes, and norms whose missing one rounds back to its bits."""

from typing import Any

import numpy as np
import pytest

from parity.models.bfloat16 import round_to_bfloat16
from parity.models.hub_layouts import qwen3_next, to_hub
from parity.models.tiny import build_tiny
from parity.models.tiny_catalogue import read
from parity.tensor import Tensor

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def drawn(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = read(name)
    shapes = {tensor: tuple(shape) for tensor, shape in read(name, ".tensors")["tensors"].items()}
    return config, build_tiny(shapes, model_type=config["model_type"])


def widened(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return tensor.values().astype(np.float32)


def test_experts_of_qwen3_next_stand_under_numbers_of_their_own() -> None:
    config, tensors = drawn("qwen3_next")
    hub = to_hub(config, tensors)
    stacked = tensors["model.layers.2.mlp.switch_mlp.up_proj.weight"]
    for expert in (0, 7):
        assert (hub[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"].bits() == stacked.bits()[expert]).all()
    assert not [name for name in hub if "switch_mlp" in name]
    assert len([name for name in hub if ".experts." in name]) == 3 * 3 * 8  # layers, projections, experts
    assert "model.layers.1.mlp.up_proj.weight" in hub  # the dense layer


def test_gate_and_up_of_qwen3_5_moe_are_one_tensor() -> None:
    config, tensors = drawn("qwen3_5_moe")
    hub = to_hub(config, tensors)
    mlp = "language_model.model.layers.1.mlp.switch_mlp"
    joined = hub["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    assert joined.shape == (8, 128, 128)
    assert (joined.bits()[:, :64] == tensors[f"{mlp}.gate_proj.weight"].bits()).all()
    assert (joined.bits()[:, 64:] == tensors[f"{mlp}.up_proj.weight"].bits()).all()
    assert hub["model.language_model.layers.1.mlp.experts.down_proj"] == tensors[f"{mlp}.down_proj.weight"]
    assert hub["lm_head.weight"] == tensors["language_model.lm_head.weight"]
    assert not [name for name in hub if name.startswith("language_model.")]


@pytest.mark.parametrize("name", FAMILIES)
def test_there_are_tensors_of_what_the_loader_drops(name: str) -> None:
    hub = to_hub(*drawn(name))
    assert [tensor for tensor in hub if tensor.startswith("mtp.")]
    assert bool([tensor for tensor in hub if tensor.startswith("model.visual.")]) == (name != "qwen3_next")


@pytest.mark.parametrize("name", FAMILIES)
def test_filters_have_the_hubs_shape_and_the_same_words(name: str) -> None:
    config, tensors = drawn(name)
    hub = to_hub(config, tensors)
    filters = {tensor: hub[tensor] for tensor in hub if tensor.endswith("conv1d.weight")}
    assert len(filters) == 3
    for tensor, stored in filters.items():
        own = tensors[tensor.replace("model.language_model.", "language_model.model.")]
        assert stored.shape == (own.shape[0], 1, 4)
        assert stored.data == own.data


@pytest.mark.parametrize("name", FAMILIES)
def test_one_added_in_bfloat16_gives_the_drawn_norm_and_added_in_float32_does_not(name: str) -> None:
    config, tensors = drawn(name)
    hub = to_hub(config, tensors)
    changed = [
        n
        for n in tensors
        if (w := hub.get(hub_name(n))) is not None and w != tensors[n] and w.shape == tensors[n].shape
    ]
    assert len(changed) == 2 * 4 + 1 + 2  # two norms a layer, the last one, and those of queries and keys
    for tensor in changed:
        stored = hub[hub_name(tensor)]
        assert (round_to_bfloat16(1 + widened(stored)) == tensors[tensor].bits()).all()
        late = 1 + widened(stored)
        assert (late != widened(tensors[tensor])).mean() > 0.5


def test_the_gated_norm_keeps_its_one() -> None:
    config, tensors = drawn("qwen3_5")
    hub = to_hub(config, tensors)
    kept = "layers.0.linear_attn.norm.weight"
    assert hub[f"model.language_model.{kept}"] == tensors[f"language_model.model.{kept}"]


def test_a_norm_that_bfloat16_cannot_store_less_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a norm's weight is not one plus a bfloat16$"):
        qwen3_next.less_one(Tensor.of(round_to_bfloat16(np.float32([2.0**-12 * 1.0078125])), "BF16"))


def hub_name(name: str) -> str:
    return name.replace("language_model.model.", "model.language_model.").removeprefix("language_model.")
