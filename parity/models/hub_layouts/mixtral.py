"""mixtral on the hub: each expert's three weights under a number of its own, named w1, w2 and w3."""

from collections.abc import Mapping
from typing import Any, Final

from parity.models.hub_layouts.single_experts import with_single_experts
from parity.tensor import Tensor

HUB_NAMES: Final = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`switch_mlp.gate_proj.weight` [X, ...] becomes `experts.0.w1.weight` and so on."""
    return with_single_experts(tensors, names=HUB_NAMES)
