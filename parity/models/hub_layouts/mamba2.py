"""mamba2: the hub stores the filters of a short convolution with their one input channel before the taps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parity.tensor import Tensor


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Filters [C, K, 1] become [C, 1, K]; the bytes stay in their order."""
    hub = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".conv1d.weight"):
            channels, kernel, one = tensor.shape
            hub[name] = replace(tensor, shape=(channels, one, kernel))
    return hub
