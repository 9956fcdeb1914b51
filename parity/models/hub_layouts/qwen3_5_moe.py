"""qwen3_5_moe on the hub: as qwen3_5, with gate and up of all experts of a layer in one tensor."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.models.hub_layouts import qwen3_5
from parity.tensor import Tensor


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`mlp.switch_mlp` becomes `mlp.experts.gate_up_proj` [X, 2F, D] and `mlp.experts.down_proj` [X, D, F]."""
    out: dict[str, Tensor] = {}
    for name, tensor in qwen3_5.to_hub(config, tensors).items():
        found = re.fullmatch(r"(.*\.mlp)\.switch_mlp\.(gate|up|down)_proj\.weight", name)
        if not found:
            out[name] = tensor
        elif found[2] == "down":
            out[f"{found[1]}.experts.down_proj"] = tensor
        elif found[2] == "gate":
            up = tensors[re.sub(r"^model\.language_model", "language_model.model", name).replace(".gate_", ".up_")]
            joined = np.concatenate([tensor.bits(), up.bits()], axis=-2)
            out[f"{found[1]}.experts.gate_up_proj"] = Tensor.of(joined, tensor.dtype)
    return out
