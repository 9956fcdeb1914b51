"""glm4_moe on the hub: experts under numbers of their own, and one layer more, which predicts several tokens ahead."""

from collections.abc import Mapping
from typing import Any

from parity.models.hub_layouts.single_experts import with_single_experts
from parity.tensor import Tensor


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`mlp.switch_mlp.NAME.weight` [X, ...] becomes `mlp.experts.0.NAME.weight` and so on.

    The layer that loaders drop is stood for by some tensors of the last real one, under the next number.
    """
    layers = config["num_hidden_layers"]
    last, extra = f"model.layers.{layers - 1}", f"model.layers.{layers}"
    norm = tensors[f"{last}.input_layernorm.weight"]
    ahead = {f"{extra}.{norm_name}.weight": norm for norm_name in ("enorm", "hnorm", "input_layernorm")}
    return {**with_single_experts(tensors), **ahead, f"{extra}.shared_head.head.weight": tensors["lm_head.weight"]}
