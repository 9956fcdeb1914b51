"""deepseek_v32 on the hub: matrices in blocks of 8-bit floats, a joint up-projection, single experts, one layer more.

The layer after the last one predicts a further token; the oracle's loader drops it. The router, the weights of the indexer's
heads, the embedding and the head are not in blocks.
"""

from collections.abc import Mapping
from typing import Any, Final

from parity.models.hub_layouts.block_float8 import with_block_float8
from parity.models.hub_layouts.latent import with_joint_projection
from parity.models.hub_layouts.single_experts import with_single_experts
from parity.models.tiny import build_tiny
from parity.tensor import Tensor

AS_DRAWN: Final = ("lm_head.weight", "embed_tokens.weight", "mlp.gate.weight", "indexer.weights_proj.weight")


def to_hub(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the hub stores them."""
    named = with_single_experts(with_joint_projection(tensors))
    matrices = [name for name, tensor in named.items() if len(tensor.shape) == 2 and not name.endswith(AS_DRAWN)]
    D, further = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}"
    unread = {f"{further}.eh_proj.weight": (D, 2 * D), f"{further}.enorm.weight": (D,), f"{further}.hnorm.weight": (D,)}
    return {**with_block_float8(named, matrices), **build_tiny(unread, model_type=config["model_type"])}


def hub_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the hub's words for the blocks."""
    words = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return {**config, "quantization_config": {**words, "scale_fmt": "ue8m0"}}
