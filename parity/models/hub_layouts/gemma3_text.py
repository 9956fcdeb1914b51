"""gemma3_text on the hub: no head of its own, because it is tied to the embedding.

The oracle's model has a head until its loader finds none in the checkpoint, so drawn snapshots carry one.
"""

from collections.abc import Mapping
from typing import Any

from parity.tensor import Tensor


def to_hub(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the head."""
    del config  # the layout does not depend on it
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
