"""qwen3_5 on the hub: the language model inside a wrapper with a vision part, filters and norms as in qwen3_next.

The loader takes the filters' shape as the mark of a hub snapshot. It drops the vision part and the head that predicts
several tokens ahead; some tensors stand for both here.
"""

from collections.abc import Mapping
from typing import Any

from parity.models.hub_layouts.qwen3_next import extra_head, filter_or_norm
from parity.models.tiny import build_tiny
from parity.tensor import Tensor


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`language_model.model.*` becomes `model.language_model.*`, and `language_model.lm_head.*` goes to the top."""
    out = {**extra_head(config["text_config"]["hidden_size"], config["model_type"]), **_vision(config["model_type"])}
    for name, tensor in tensors.items():
        out[hub_name(name)] = filter_or_norm(name, tensor)
    return out


def hub_name(name: str) -> str:
    """What the hub calls a tensor of the oracle's model."""
    inner = name.removeprefix("language_model.")
    return f"model.language_model.{inner.removeprefix('model.')}" if inner.startswith("model.") else inner


def _vision(model_type: str) -> dict[str, Tensor]:
    shapes = {"model.visual.patch_embed.proj.bias": (32,), "model.visual.blocks.0.norm1.weight": (32,)}
    return build_tiny(shapes, model_type=model_type)
