"""Hub layouts of mamba2, nemotron_h, falcon_h1, granitemoehybrid and lfm2: names, shapes, and not one word changed."""

from typing import Any

import numpy as np
import pytest

from parity.models.hub_layouts import to_hub
from parity.models.tiny import build_tiny
from parity.models.tiny_catalogue import read
from parity.tensor import Tensor

CONFIGS = (
    "mamba2",
    "nemotron_h",
    "nemotron_h_latent",
    "falcon_h1",
    "falcon_h1_norm",
    "granitemoehybrid",
    "granitemoehybrid_dense",
    "lfm2",
)


def drawn(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = read(name)
    shapes = {tensor: tuple(shape) for tensor, shape in read(name, ".tensors")["tensors"].items()}
    return config, build_tiny(shapes, model_type=config["model_type"])


@pytest.mark.parametrize("name", CONFIGS)
def test_filters_have_the_hubs_shape_and_the_same_words(name: str) -> None:
    config, tensors = drawn(name)
    hub = to_hub(config, tensors)
    filters = [tensor for tensor in tensors if tensor.endswith((".conv1d.weight", ".conv.conv.weight"))]
    assert filters
    for tensor in filters:
        channels, kernel, one = tensors[tensor].shape
        assert hub[tensor].shape == (channels, one, kernel)
        assert hub[tensor].data == tensors[tensor].data


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "falcon_h1_norm", "lfm2"])
def test_everything_else_stays_where_only_filters_change(name: str) -> None:
    config, tensors = drawn(name)
    hub = to_hub(config, tensors)
    assert hub.keys() == tensors.keys()
    assert all(hub[n].digest == t.digest for n, t in tensors.items() if "conv" not in n or n.endswith(".bias"))


@pytest.mark.parametrize(("name", "layer"), [("nemotron_h", 4), ("nemotron_h_latent", 1)])
def test_experts_of_nemotron_h_stand_one_by_one(name: str, layer: int) -> None:
    config, tensors = drawn(name)
    hub = to_hub(config, tensors)
    mixer = f"backbone.layers.{layer}.mixer"
    for leaf, stack in (("up_proj", "fc1"), ("down_proj", "fc2")):
        alone = [hub[f"{mixer}.experts.{i}.{leaf}.weight"].bits() for i in range(8)]
        assert np.array_equal(np.stack(alone), tensors[f"{mixer}.switch_mlp.{stack}.weight"].bits())
    assert not [tensor for tensor in hub if "switch_mlp" in tensor]
    assert [tensor for tensor in hub if tensor.startswith("mtp.")] == ["mtp.layers.0.norm.weight"]


def test_gate_and_up_of_granitemoehybrid_are_one_tensor_an_expert() -> None:
    config, tensors = drawn("granitemoehybrid")
    hub = to_hub(config, tensors)
    moe = "model.layers.1.block_sparse_moe"
    both = hub[f"{moe}.input_linear.weight"]
    assert both.shape == (8, 128, 128)
    assert np.array_equal(both.bits()[:, :64], tensors[f"{moe}.switch_mlp.gate_proj.weight"].bits())
    assert np.array_equal(both.bits()[:, 64:], tensors[f"{moe}.switch_mlp.up_proj.weight"].bits())
    assert hub[f"{moe}.output_linear.weight"] == tensors[f"{moe}.switch_mlp.down_proj.weight"]
    assert not [tensor for tensor in hub if "switch_mlp" in tensor]
    assert hub["lm_head.weight"] == tensors["model.embed_tokens.weight"]


def test_a_dense_granitemoehybrid_keeps_its_layer_under_the_shared_experts_name() -> None:
    config, tensors = drawn("granitemoehybrid_dense")
    hub = to_hub(config, tensors)
    both = hub["model.layers.0.shared_mlp.input_linear.weight"]
    assert np.array_equal(both.bits()[:128], tensors["model.layers.0.mlp.gate_proj.weight"].bits())
    assert np.array_equal(both.bits()[128:], tensors["model.layers.0.mlp.up_proj.weight"].bits())
    assert hub["model.layers.0.shared_mlp.output_linear.weight"] == tensors["model.layers.0.mlp.down_proj.weight"]
    assert not [tensor for tensor in hub if ".mlp." in tensor]
