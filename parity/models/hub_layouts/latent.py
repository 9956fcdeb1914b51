"""What the hub's snapshots of latent-attention families have in common: a joint up-projection.

The hub keeps one matrix `kv_b_proj` from the latent to every head's key and value; the oracle's loader cuts it into
`embed_q` (keys, transposed) and `unembed_out` (values).
"""

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
