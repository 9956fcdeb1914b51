"""kimi_linear on the hub: other names around the experts, filters with the channels first, a joint up-projection."""

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from parity.models.hub_layouts.latent import with_joint_projection
from parity.models.hub_layouts.single_experts import with_single_experts
from parity.tensor import Tensor

EXPERT_NAMES: Final = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def to_hub(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the hub names and shapes them."""
    out: dict[str, Tensor] = {}
    routed = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    for name, tensor in with_single_experts(with_joint_projection(tensors)).items():
        found = re.fullmatch(r"(model\.layers\.(\d+))\.(mlp|self_attn)\.(.+)", name)
        if found and found[3] == "mlp" and int(found[2]) in routed:
            out[f"{found[1]}.block_sparse_moe.{_expert_layer_name(found[4])}"] = tensor
        elif found and found[4].endswith("_conv.conv.weight"):
            filters = np.swapaxes(tensor.bits(), 1, 2)  # [C, K, 1] to [C, 1, K]
            out[f"{found[1]}.self_attn.{found[4][0]}_conv1d.weight"] = Tensor.of(filters, tensor.dtype)
        else:
            out[name] = tensor
    return out


def _expert_layer_name(name: str) -> str:
    """The hub's name of a tensor below the expert layer."""
    if name == "e_score_correction_bias":
        return f"gate.{name}"
    single = re.fullmatch(r"(experts\.\d+)\.(\w+)\.weight", name)
    return f"{single[1]}.{EXPERT_NAMES[single[2]]}.weight" if single else name
