"""qwen3_moe on the hub: each expert's three weights under a number of its own."""

import re
from collections.abc import Mapping
from typing import Any

from parity.tensor import Tensor


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`mlp.switch_mlp.NAME.weight` [X, ...] becomes `mlp.experts.0.NAME.weight` and so on."""
    del config
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if stacked := re.fullmatch(r"(.*\.mlp)\.switch_mlp\.(.*)", name):
            for expert, words in enumerate(tensor.bits()):
                out[f"{stacked[1]}.experts.{expert}.{stacked[2]}"] = Tensor.of(words, tensor.dtype)
        else:
            out[name] = tensor
    return out
