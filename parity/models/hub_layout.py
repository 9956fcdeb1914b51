"""From the oracle's tensor layout back to the hub's: what an unconverted snapshot of a family looks like.

Where mlx-lm's loader renames, stacks, splits or rescales tensors, a family has a function here that undoes it on drawn
tensors, so that engine and oracle can be tried on the hub's own names and shapes. A family without one has the same layout
in both. Bits are moved, never computed with, except where the loader itself computes.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from parity.tensor import Tensor

Tensors = dict[str, Tensor]
Undo = Callable[[Mapping[str, Any], Tensors], Tensors]

HUB_LAYOUTS: Final[Mapping[str, Undo]] = {}


def to_hub(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Tensors as the hub's snapshot of this config would hold them."""
    return HUB_LAYOUTS[config["model_type"]](config, tensors)
