"""falcon_h1: on the hub the filters of the convolution are laid out otherwise, and no multiplier is in a weight yet.

The loader takes the filters' shape as the mark of a hub snapshot and multiplies most weights by scalars of the config. What
is drawn serves as the weights before that, so the hub's snapshot is another model than the drawn one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parity.tensor import Tensor


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Filters [C, K, 1] become [C, 1, K]; every other tensor stays as drawn."""
    hub = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".conv1d.weight"):
            channels, kernel, one = tensor.shape
            hub[name] = replace(tensor, shape=(channels, one, kernel))
    return hub
