"""Whether a step has parts for what a plan holds.

Guarantees: a weight that a part would read otherwise than the model does is a reason.
"""

from engine.kernels.layout import NAMES, laid_out_for
from engine.kernels.matrix import FastMatrix
from engine.kernels.plan import ExpertsPlan, LayerPlan, NotFusedError, Plan
from engine.linear import Linear
from engine.norm import LayerNorm


def check_layer(layer: LayerPlan, plan: Plan) -> None:
    """Look at all weights of a layer, and at the model's last norm.

    Raises:
        NotFusedError: One is not as the parts take it.
    """
    if plan.dtype not in NAMES:
        raise NotFusedError(f"activations of {plan.dtype}")
    for linear in layer.linears:
        _check_linear(linear, plan)
    if isinstance(layer.mlp, ExpertsPlan):
        for matrix in layer.mlp.matrices:
            if laid_out_for(matrix.laid(), plan.dtype) is None:
                raise NotFusedError(f"{layer.mlp.path} is not of the dtype of the norms")
    for norm in (*layer.norms, plan.norm):
        if norm.weight is None or norm.weight.dtype != plan.dtype:
            raise NotFusedError(f"{norm.path} has no weight of the model's dtype")
        if isinstance(norm, LayerNorm) and norm.bias is not None and norm.bias.dtype != plan.dtype:
            raise NotFusedError(f"{norm.path} has a bias of another dtype than the model's")
    if layer.rope is not None and layer.rope.width % 2:
        raise NotFusedError("a rotation of an odd number of elements")


def _check_linear(linear: Linear, plan: Plan) -> None:
    if not isinstance(linear.weight, FastMatrix):
        raise NotFusedError(f"{linear.path} has no compiled product")
    is_other = linear.bias is not None and linear.bias.dtype != plan.dtype
    if laid_out_for(linear.weight.laid(), plan.dtype) is None or is_other:
        raise NotFusedError(f"{linear.path} is not of the dtype of the norms")
