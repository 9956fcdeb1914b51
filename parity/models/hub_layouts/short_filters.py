"""Filters of a short convolution: the hub stores them with their one input channel before the taps."""

from collections.abc import Mapping
from dataclasses import replace

from parity.tensor import Tensor


def with_hub_filters(tensors: Mapping[str, Tensor], *, ending: str = ".conv1d.weight") -> dict[str, Tensor]:
    """Every tensor of that ending, [C, K, 1], becomes [C, 1, K]; the bytes stay in their order."""
    return {name: hub_filter(tensor) if name.endswith(ending) else tensor for name, tensor in tensors.items()}


def hub_filter(tensor: Tensor) -> Tensor:
    """[C, K, 1] as [C, 1, K]; the bytes stay in their order."""
    channels, kernel, one = tensor.shape
    return replace(tensor, shape=(channels, one, kernel))
