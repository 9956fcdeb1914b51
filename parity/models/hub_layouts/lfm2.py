"""lfm2: the hub stores the filters of a short convolution with their one input channel before the taps."""

from collections.abc import Mapping
from typing import Any

from parity.models.hub_layouts.short_filters import with_hub_filters
from parity.tensor import Tensor


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Filters [C, K, 1] become [C, 1, K]; the bytes stay in their order."""
    return with_hub_filters(tensors, ending=".conv.conv.weight")
