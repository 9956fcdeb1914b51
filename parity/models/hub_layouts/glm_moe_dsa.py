"""glm_moe_dsa on the hub: a joint up-projection, single experts, and one layer more, which predicts a further token.

The oracle's loader drops that layer.
"""

from collections.abc import Mapping
from typing import Any

from parity.models.hub_layouts.latent import with_joint_projection
from parity.models.hub_layouts.single_experts import with_single_experts
from parity.models.tiny import build_tiny
from parity.tensor import Tensor


def to_hub(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the hub names them."""
    D, further = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}"
    unread = {f"{further}.eh_proj.weight": (D, 2 * D), f"{further}.enorm.weight": (D,), f"{further}.hnorm.weight": (D,)}
    return {
        **with_single_experts(with_joint_projection(tensors)),
        **build_tiny(unread, model_type=config["model_type"]),
    }
