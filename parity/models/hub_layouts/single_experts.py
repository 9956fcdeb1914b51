"""Experts one by one: the hub keeps a tensor an expert where the oracle's loader stacks them."""

import re
from collections.abc import Mapping

from parity.tensor import Tensor


def with_single_experts(tensors: Mapping[str, Tensor], *, names: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """`switch_mlp.gate_proj.weight` [X, F, D] and its like cut into `experts.0.gate_proj.weight` and so on.

    Args:
        tensors: By the oracle's names.
        names: The hub's own words for the layers of an expert, where it has some.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if stacked := re.fullmatch(r"(.+)\.switch_mlp\.(\w+)\.weight", name):
            layer = (names or {}).get(stacked[2], stacked[2])
            for i, expert in enumerate(tensor.bits()):
                out[f"{stacked[1]}.experts.{i}.{layer}.weight"] = Tensor.of(expert, tensor.dtype)
        else:
            out[name] = tensor
    return out
