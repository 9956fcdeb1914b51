"""mistral3: on the hub the text model stands beside a vision tower, under names of another order.

`language_model.model.X` is `model.language_model.X` there, the head stands outside, and the tensors of the tower and its
projector, which the oracle drops, are there as well. What the text model itself has of a layout of its own is undone first.
"""

from collections.abc import Mapping
from typing import Any, Final

from parity.models.hub_layouts import ministral3
from parity.tensor import Tensor

TEXT: Final = "language_model."
UNREAD: Final = ("model.vision_tower.ln_pre.weight", "model.multi_modal_projector.norm.weight")


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the text model's tensors and add two that nobody reads."""
    text = {name.removeprefix(TEXT): tensor for name, tensor in tensors.items()}
    unread = dict.fromkeys(UNREAD, text["model.norm.weight"])
    if config["text_config"]["model_type"] == "ministral3":
        text = ministral3.to_hub(config["text_config"], text)
    return {_renamed(name): tensor for name, tensor in text.items()} | unread


def _renamed(name: str) -> str:
    return name.replace("model.", f"model.{TEXT}", 1) if name.startswith("model.") else name
