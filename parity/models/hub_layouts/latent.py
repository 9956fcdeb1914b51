"""What the hub's snapshots of latent-attention families have in common: a joint up-projection, and experts one by one.

The hub keeps one matrix `kv_b_proj` from the latent to every head's key and value; the oracle's loader cuts it into
`embed_q` (keys, transposed) and `unembed_out` (values). It also keeps one tensor an expert where the loader stacks them.
"""

import re
from collections.abc import Mapping

import numpy as np

from parity.tensor import Tensor


def with_joint_projection(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`embed_q` [H, C, N] and `unembed_out` [H, E, C] joined to `kv_b_proj` [H * (N + E), C]."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        attention, found, _ = name.partition(".embed_q.weight")
        if found:
            values = tensors[f"{attention}.unembed_out.weight"]
            joint_HEC = np.concatenate([tensor.bits().swapaxes(1, 2), values.bits()], axis=1)
            out[f"{attention}.kv_b_proj.weight"] = Tensor.of(joint_HEC.reshape(-1, joint_HEC.shape[-1]), tensor.dtype)
        elif not name.endswith(".unembed_out.weight"):
            out[name] = tensor
    return out


def with_single_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`switch_mlp.gate_proj.weight` [X, F, D] and its like cut into `experts.0.gate_proj.weight` and so on."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stacked = re.fullmatch(r"(.+)\.switch_mlp\.(\w+\.weight)", name)
        if stacked:
            for i, expert in enumerate(tensor.bits()):
                out[f"{stacked[1]}.experts.{i}.{stacked[2]}"] = Tensor.of(expert, tensor.dtype)
        else:
            out[name] = tensor
    return out
