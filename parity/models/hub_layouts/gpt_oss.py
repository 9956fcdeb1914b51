"""gpt_oss on the hub: experts packed as mxfp4 in blocks of 16 bytes, the rows of gate and up taking turns.

The hub has the experts in no other form that mlx-lm loads, so the drawn ones are packed here, and config.json gains the
entry that says so.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from parity.models.weight_format import FORMATS, packed
from parity.tensor import Tensor

BLOCK: Final = 16  # bytes: 32 elements, which share a scale
Words = npt.NDArray[np.unsignedinteger[Any]]


def hub_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the hub's word for packed experts."""
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each layer's three experts' weights and biases become `gate_up_proj_*` and `down_proj_*`."""
    del config
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    paths = {found[1] for name in tensors if (found := re.fullmatch(r"(.*\.experts)\.gate_proj\.weight", name))}
    for path in sorted(paths):
        gate, up, down = (_experts(tensors, f"{path}.{name}") for name in ("gate_proj", "up_proj", "down_proj"))
        both = {leaf: Tensor.of(_in_turns(gate[leaf].bits(), up[leaf].bits()), gate[leaf].dtype) for leaf in gate}
        for name, leaves in (("gate_up_proj", both), ("down_proj", down)):
            out |= {f"{path}.{name}_{leaf}": tensor for leaf, tensor in leaves.items()}
    return out


def _experts(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """Blocks [X, out, in / 32, 16], scales [X, out, in / 32] and bias [X, out]."""
    words = packed(tensors[f"{path}.weight"].values().astype(np.float32), FORMATS["mxfp4"])
    scales = words["scales"]
    blocks = np.frombuffer(words["weight"].data, dtype="<u1").reshape(*scales.shape, BLOCK)
    return {"blocks": Tensor.of(blocks), "scales": scales, "bias": tensors[f"{path}.bias"]}


def _in_turns(even: Words, odd: Words) -> Words:
    """Rows (axis 1) of the first at even places, of the second at odd ones."""
    return np.stack([even, odd], axis=2).reshape(even.shape[0], -1, *even.shape[2:])
