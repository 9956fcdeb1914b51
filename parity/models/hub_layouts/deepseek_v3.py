"""deepseek_v3 on the hub: one joint up-projection from the latent, one tensor an expert, tables of rotary frequencies."""

from collections.abc import Mapping
from typing import Any

from parity.models.hub_layouts.latent import with_joint_projection
from parity.models.hub_layouts.single_experts import with_single_experts
from parity.models.tiny import build_tiny
from parity.tensor import Tensor


def to_hub(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the hub names them, with the frequencies that the loader drops."""
    tables = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (config["qk_rope_head_dim"] // 2,)
        for layer in range(config["num_hidden_layers"])
    }
    return {
        **with_single_experts(with_joint_projection(tensors)),
        **build_tiny(tables, model_type=config["model_type"]),
    }
