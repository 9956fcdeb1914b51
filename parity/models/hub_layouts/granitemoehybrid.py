"""granitemoehybrid: on the hub gate and up are one tensor, and filters have their one input channel before the taps.

A config without experts keeps its feed-forward layer under the name of the shared expert there. A tied head may be stored
all the same; the loader drops it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parity.models.hub_layouts.short_filters import hub_filter
from parity.tensor import Tensor


def to_hub(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Filters [C, K, 1] become [C, 1, K]; gate and up [.., F, D] become [.., 2F, D], gate first."""
    old, new = "block_sparse_moe.switch_mlp", "block_sparse_moe"
    if not config.get("num_local_experts"):
        old, new = "mlp", "shared_mlp"
    hub = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if config["tie_word_embeddings"] else {}
    for name, tensor in tensors.items():
        if name.endswith(f".{old}.gate_proj.weight"):
            stem = name.removesuffix(f"{old}.gate_proj.weight")
            up = tensors[f"{stem}{old}.up_proj.weight"]
            hub[f"{stem}{new}.input_linear.weight"] = _joined(tensor, up)
        elif name.endswith(f".{old}.down_proj.weight"):
            hub[f"{name.removesuffix(f'{old}.down_proj.weight')}{new}.output_linear.weight"] = tensor
        elif name.endswith(".conv1d.weight"):
            hub[name] = hub_filter(tensor)
        elif not name.endswith(f".{old}.up_proj.weight"):
            hub[name] = tensor
    return hub


def _joined(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of `gate`, then rows of `up`, expert by expert where they are stacked."""
    *stack, rows, columns = gate.shape
    count = stack[0] if stack else 1
    size = len(gate.data) // count
    pieces = (part.data[i * size : (i + 1) * size] for i in range(count) for part in (gate, up))
    return replace(gate, shape=(*stack, 2 * rows, columns), data=b"".join(pieces))
