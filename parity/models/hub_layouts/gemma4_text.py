"""gemma4_text on the hub: gate and up of the experts in one tensor, and projections that nothing reads.

Layers that read the keys and values of earlier ones still carry projections of their own, and every layer a table of
rotary frequencies; the oracle's loader drops both. What is dropped is drawn here by its name, like any other tensor.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.models.tiny import build_tiny
from parity.tensor import Tensor

EXPERTS = re.compile(r"(.*\.experts)\.switch_glu\.(gate|up|down)_proj\.weight")


def to_hub(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with experts joined, and with what the loader drops."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = EXPERTS.fullmatch(name)
        if not found:
            out[name] = tensor
        elif found[2] == "down":
            out[f"{found[1]}.down_proj"] = tensor
        elif found[2] == "gate":
            up = tensors[f"{found[1]}.switch_glu.up_proj.weight"]
            joined = np.concatenate([tensor.bits(), up.bits()], axis=-2)
            out[f"{found[1]}.gate_up_proj"] = Tensor.of(joined, tensor.dtype)
    return {**out, **build_tiny(_unread(config), model_type=config["model_type"])}


def _unread(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the loader drops."""
    shapes: dict[str, tuple[int, ...]] = {}
    own = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    for layer, kind in enumerate(config["layer_types"]):
        attention = f"model.layers.{layer}.self_attn"
        E = config["global_head_dim"] if kind == "full_attention" else config["head_dim"]
        shapes[f"{attention}.rotary_emb.inv_freq"] = (E // 2,)
        if layer >= own:
            K, D = config["num_key_value_heads"], config["hidden_size"]
            shapes |= {f"{attention}.{name}.weight": (K * E, D) for name in ("k_proj", "v_proj")}
            shapes[f"{attention}.k_norm.weight"] = (E,)
    return shapes
