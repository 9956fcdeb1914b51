"""qwen3_moe on the hub: each expert's three weights under a number of its own."""

from collections.abc import Mapping
from typing import Any

from parity.models.hub_layouts.single_experts import with_single_experts
from parity.tensor import Tensor


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`mlp.switch_mlp.NAME.weight` [X, ...] becomes `mlp.experts.0.NAME.weight` and so on."""
    return with_single_experts(tensors)
