"""mixtral on the hub: each expert's three weights under a number of its own, named w1, w2 and w3."""

import re
from collections.abc import Mapping
from typing import Any, Final

from parity.tensor import Tensor

HUB_NAMES: Final = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`switch_mlp.gate_proj.weight` [X, ...] becomes `experts.0.w1.weight` and so on."""
    del config
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if stacked := re.fullmatch(r"(.*\.block_sparse_moe)\.switch_mlp\.(\w+)\.weight", name):
            for expert, words in enumerate(tensor.bits()):
                hub = f"{stacked[1]}.experts.{expert}.{HUB_NAMES[stacked[2]]}.weight"
                out[hub] = Tensor.of(words, tensor.dtype)
        else:
            out[name] = tensor
    return out
