"""minicpm: on the hub an untied config may come without a head.

The oracle then reads the embedding as the head, divided as a head of its own would be; so the hub's layout is the drawn one
without `lm_head.weight`.
"""

from collections.abc import Mapping
from typing import Any

from parity.tensor import Tensor


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave the head out."""
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
