"""qwen3_next on the hub: experts under numbers of their own, other filters' shape, norms without their one, an extra head.

The loader takes the numbered experts as the mark of a hub snapshot, stacks them, transposes the filters and adds one to the
weights of most norms. The head that predicts several tokens ahead it drops; some tensors stand for it here.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from parity.models.bfloat16 import round_to_bfloat16
from parity.models.hub_layouts.short_filters import hub_filter
from parity.models.hub_layouts.single_experts import with_single_experts
from parity.models.tiny import build_tiny
from parity.tensor import Tensor

OFFSET_NORM: Final = re.compile(
    r".*(\.input_layernorm|\.post_attention_layernorm|\.q_norm|\.k_norm|(^|\.)model\.norm)\.weight"
)
FINER: Final = np.float32(2**-10)


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`mlp.switch_mlp.NAME.weight` [X, ...] becomes `mlp.experts.0.NAME.weight` and so on; filters and norms as below."""
    out = extra_head(config["hidden_size"], config["model_type"])
    return out | {name: filter_or_norm(name, tensor) for name, tensor in with_single_experts(tensors).items()}


def extra_head(width: int, model_type: str) -> dict[str, Tensor]:
    """Some tensors of the head that predicts several tokens ahead, with filters and norms' names among them."""
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.layers.0.input_layernorm.weight": (width,),
        "mtp.norm.weight": (width,),
    }
    return build_tiny(shapes, model_type=model_type)


def filter_or_norm(name: str, tensor: Tensor) -> Tensor:
    """Filters [C, K, 1] become [C, 1, K]; a norm's weight loses one; any other tensor stays."""
    if name.endswith(".conv1d.weight"):
        return hub_filter(tensor)
    return less_one(tensor) if OFFSET_NORM.fullmatch(name) else tensor


def less_one(tensor: Tensor) -> Tensor:
    """A bfloat16 weight w as its offset from one.

    Trained offsets are finer than what is left of them once the loader has added one in bfloat16. So are these wherever that
    gives w again: who adds one after a cast to float32 gets other bits.
    """
    weight = tensor.values().astype(np.float32)
    exact = round_to_bfloat16(weight - 1)
    finer = round_to_bfloat16(weight - 1 + FINER)
    returns = round_to_bfloat16(1 + _widened(finer)) == tensor.bits()
    offset = np.where(returns, finer, exact)
    if (round_to_bfloat16(1 + _widened(offset)) != tensor.bits()).any():
        raise ValueError("a norm's weight is not one plus a bfloat16")
    return Tensor.of(offset, "BF16")


def _widened(words: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
