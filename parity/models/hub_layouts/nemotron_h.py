"""nemotron_h: on the hub every expert has tensors of its own, and filters have their one input channel before the taps.

Layers that predict further tokens stand beside the model there; the loader drops them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from parity.tensor import Tensor

EXPERT: Final = {"switch_mlp.fc1.weight": "up_proj", "switch_mlp.fc2.weight": "down_proj"}


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Filters [C, K, 1] become [C, 1, K]; each stack [X, out, in] becomes X matrices; a tensor that is dropped joins them."""
    hub = {"mtp.layers.0.norm.weight": tensors["backbone.norm_f.weight"]}
    for name, tensor in tensors.items():
        stack = next((leaf for leaf in EXPERT if name.endswith(leaf)), None)
        if stack is not None:
            count, *shape = tensor.shape
            size = len(tensor.data) // count
            for i in range(count):
                own = replace(tensor, shape=tuple(shape), data=tensor.data[i * size : (i + 1) * size])
                hub[f"{name.removesuffix(stack)}experts.{i}.{EXPERT[stack]}.weight"] = own
        elif name.endswith(".conv1d.weight"):
            channels, kernel, one = tensor.shape
            hub[name] = replace(tensor, shape=(channels, one, kernel))
        else:
            hub[name] = tensor
    return hub
