"""How many bytes of weights a decode step reads: what bandwidth is spent on.

Counted are the matrices of linear layers, of the head and of the experts as they lie in memory; rows of an embedding that are
looked up, keys, values and activations are not.
"""

from typing import Any

import mlx.core as mx  # noqa: TC002 - beside the others

from engine.kernels.experts import FastExperts
from engine.kernels.fused import FusedModel
from engine.kernels.level import Layer, mapped
from engine.kernels.matrix import FastMatrix
from engine.linear import Embedding, Packed


def weight_bytes(model: Any) -> int:  # noqa: ANN401 - any tree of layers
    """Bytes of all matrices, each counted once; of experts all, though a token goes through a few.

    Args:
        model: On kernels or not; laid out, that is after a first forward.
    """
    found: dict[int, int] = {}
    tied: list[mx.array | Packed] = []

    def note(layer: Layer) -> Layer:
        if not isinstance(layer, Embedding):
            found[id(layer.weight)] = _size(layer.weight)
        elif layer.head is None:
            tied.append(layer.weight)
        else:
            found[id(layer.head)] = _size(layer.head)
        return layer

    root = model.linear if isinstance(model, FusedModel) else model
    mapped(root, note)
    if getattr(root, "head", None) is None:
        found |= {id(weight): _size(weight) for weight in tied}
    return sum(found.values())


def _size(weight: Any) -> int:  # noqa: ANN401 - what a layer may hold
    if isinstance(weight, FastMatrix):
        return weight.laid().size
    if isinstance(weight, FastExperts):
        return _size(weight.restored())
    if isinstance(weight, Packed):
        return weight.weight.nbytes + weight.scales.nbytes + (0 if weight.biases is None else weight.biases.nbytes)
    return int(weight.nbytes)
