"""From the oracle's tensor layout back to the hub's: what an unconverted snapshot of a family looks like.

Where mlx-lm's loader renames, stacks, splits or rescales tensors, a family has a file here, named after its model_type,
whose `to_hub(config, tensors)` undoes that on drawn tensors. Engine and oracle are then tried on the hub's own names and
shapes. A family without a file has the same layout in both. Bits are moved, never computed with, except where the loader
itself computes.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from parity.tensor import Tensor

Tensors = dict[str, Tensor]


def has_hub_layout(model_type: str) -> bool:
    """Whether a family's layout on the hub differs from the oracle's."""
    return find_spec(f"{__name__}.{model_type}") is not None


def to_hub(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Tensors as the hub's snapshot of this config would hold them."""
    undone: Tensors = import_module(f"{__name__}.{config['model_type']}").to_hub(config, tensors)
    return undone


def hub_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as the hub's snapshot has it: another one where the layout's file has a `hub_config` of its own."""
    own = getattr(import_module(f"{__name__}.{config['model_type']}"), "hub_config", dict)
    changed: dict[str, Any] = own(config)
    return changed
