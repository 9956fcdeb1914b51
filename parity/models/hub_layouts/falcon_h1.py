"""falcon_h1: on the hub the filters of the convolution are laid out otherwise, and no multiplier is in a weight yet.

The loader takes the filters' shape as the mark of a hub snapshot and multiplies most weights by scalars of the config. What
is drawn serves as the weights before that, so the hub's snapshot is another model than the drawn one.
"""

from collections.abc import Mapping
from typing import Any

from parity.models.hub_layouts.short_filters import with_hub_filters
from parity.tensor import Tensor


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Filters [C, K, 1] become [C, 1, K]; every other tensor stays as drawn."""
    return with_hub_filters(tensors)
