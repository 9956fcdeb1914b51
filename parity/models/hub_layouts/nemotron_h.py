"""nemotron_h: on the hub every expert has tensors of its own, and filters have their one input channel before the taps.

Layers that predict further tokens stand beside the model there; the loader drops them.
"""

from collections.abc import Mapping
from typing import Any, Final

from parity.models.hub_layouts.short_filters import with_hub_filters
from parity.models.hub_layouts.single_experts import with_single_experts
from parity.tensor import Tensor

HUB_NAMES: Final = {"fc1": "up_proj", "fc2": "down_proj"}


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Filters [C, K, 1] become [C, 1, K]; each stack [X, out, in] becomes X matrices; a tensor that is dropped joins them."""
    hub = {"mtp.layers.0.norm.weight": tensors["backbone.norm_f.weight"]}
    return hub | with_hub_filters(with_single_experts(tensors, names=HUB_NAMES))
