"""What the plans of several families have in common: kinds of attention, of MLP, of embedding.

Guarantees: those of `engine.kernels.families`: what is not of the kind that is asked for is a reason, never ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import mlx.core as mx

from engine.activation import geglu, geglu_approx, swiglu
from engine.grouped_attention import GroupedAttention
from engine.kernels.experts import FastExperts
from engine.kernels.fields import GEGLU, GEGLU_APPROX, SWIGLU
from engine.kernels.matrix import FastMatrix
from engine.kernels.plan import DensePlan, ExpertsPlan, LayerPlan, NotFusedError, Outputs, Plan
from engine.linear import Linear
from engine.mlp import FusedGatedMLP, GatedMLP
from engine.moe import ExpertLinear, GatedExperts

ACTIVATIONS: Final[Mapping[Any, int]] = {swiglu: SWIGLU, geglu_approx: GEGLU_APPROX, geglu: GEGLU}


def scaled(model: Any, factor: float) -> Callable[[mx.array], mx.array]:  # noqa: ANN401
    """An embedding times a number, which takes its dtype."""

    def embed(ids_BL: mx.array) -> mx.array:
        x_BLD: mx.array = model.embedding(ids_BL) * factor
        return x_BLD

    return embed


def four(attention: Any) -> dict[str, Any]:  # noqa: ANN401
    """Four projections of their own."""
    projections = {name: Outputs(linear=getattr(attention, name)) for name in ("q", "k", "v")}
    return {**projections, "o": attention.o}


def grouped(attention: Any) -> dict[str, Any]:  # noqa: ANN401
    """The attention that most families share."""
    if type(attention) is not GroupedAttention:
        raise NotFusedError(f"attention of the kind {type(attention).__name__}")
    names = ("q_norm", "k_norm", "rope", "window", "scale")
    return {**four(attention), **{name: getattr(attention, name) for name in names}}


def cut(linear: Linear, *counts: int) -> tuple[Outputs, ...]:
    """Outputs of one projection for several things, in turn."""
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(Outputs(linear=linear, first=first, count=count) for first, count in zip(firsts, counts, strict=True))


def gated(mlp: Any) -> DensePlan:  # noqa: ANN401
    """A gated MLP, its projections apart or joined."""
    if type(mlp) is FusedGatedMLP:
        if not isinstance(mlp.gate_up.weight, FastMatrix):
            raise NotFusedError(f"{mlp.gate_up.path} has no compiled product")
        inner = mlp.gate_up.weight.laid().outputs // 2
        gate, up = cut(mlp.gate_up, inner, inner)
    elif type(mlp) is GatedMLP:
        gate, up = Outputs(linear=mlp.gate), Outputs(linear=mlp.up)
    else:
        raise NotFusedError(f"an MLP of the kind {type(mlp).__name__}")
    return DensePlan(gate=gate, up=up, down=mlp.down, activation=activation_of(mlp.activation))


def experts(mlp: Any, *, kind: int, normalised: bool) -> ExpertsPlan:  # noqa: ANN401
    """Experts behind a router."""
    layers = mlp.experts
    if type(layers) is not GatedExperts:
        raise NotFusedError(f"experts of the kind {type(layers).__name__}")

    def matrix(layer: ExpertLinear) -> FastExperts:
        if not isinstance(layer.weight, FastExperts):
            raise NotFusedError(f"{layers.path} has no compiled product")
        if layer.bias is not None:
            raise NotFusedError(f"{layers.path} has biases")
        return layer.weight

    return ExpertsPlan(
        path=layers.path,
        router=mlp.router,
        gate=matrix(layers.gate),
        up=matrix(layers.up),
        down=matrix(layers.down),
        activation=activation_of(layers.activation),
        chosen=mlp.chosen,
        kind=kind,
        normalised=normalised,
    )


def activation_of(activation: Any) -> int:  # noqa: ANN401
    """The activation that parts know it by."""
    if activation not in ACTIVATIONS:
        raise NotFusedError(f"the activation {getattr(activation, '__name__', activation)}")
    return ACTIVATIONS[activation]


def whole_plan(model: Any, embed: Callable[[mx.array], mx.array], layers: tuple[LayerPlan, ...]) -> Plan:  # noqa: ANN401
    """The plan of a model with an embedding, blocks and a norm."""
    weight = model.norm.weight
    return Plan(
        layers=layers,
        norm=model.norm,
        embed=embed,
        width=weight.shape[0],
        head_width=model.head_width,
        dtype=weight.dtype,
    )
