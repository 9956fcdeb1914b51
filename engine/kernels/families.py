"""The families that have a fused step: how the blocks of each are a plan.

Guarantees: a family is in the table only if its blocks are of the kind that its entry says; everything in a block that the step
has no part for is a reason, never ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import mlx.core as mx

from engine.activation import geglu, geglu_approx, swiglu
from engine.grouped_attention import GroupedAttention
from engine.kernels.fields import GEGLU, GEGLU_APPROX, SWIGLU
from engine.kernels.layout import NAMES, laid_out_for
from engine.kernels.matrix import FastMatrix
from engine.kernels.plan import LayerPlan, NotFusedError, Outputs, Plan
from engine.mlp import GatedMLP
from engine.norm import LayerNorm


def plan_of(model: Any) -> Plan:  # noqa: ANN401 - any family's
    """The plan of a model whose linear layers are on kernels.

    Raises:
        NotFusedError: The family, or something in this model, has no fused step.
    """
    family = type(model).__module__.rpartition(".")[2]
    if family not in FAMILIES:
        raise NotFusedError(f"the family {family} has none")
    plan = FAMILIES[family](model)
    for layer in plan.layers:
        _check(layer, plan)
    if plan.embed(mx.array([[0]])).dtype != plan.dtype:
        raise NotFusedError("an embedding of another dtype than the norms")
    return plan


def _pre_norm(model: Any, *, embed: Callable[[mx.array], mx.array] | None = None) -> Plan:  # noqa: ANN401
    """Blocks of `input_norm`, `attention`, `post_norm` and `mlp`, the embedding as it is where nothing else is said."""
    layers = tuple(
        LayerPlan(
            input_norm=block.input_norm,
            **_grouped(block.attention),
            mlp_input_norm=block.post_norm,
            **_gated(block.mlp),
        )
        for block in model.blocks
    )
    return _plan(model, embed or model.embedding, layers)


def _gemma(model: Any) -> Plan:  # noqa: ANN401
    """Pre-norm blocks behind a scaled embedding."""
    return _pre_norm(model, embed=_scaled(model, model.config.hidden_size**0.5))


def _gemma3(model: Any) -> Plan:  # noqa: ANN401
    """Norms on both sides of each half, and a factor on the embedding, which is rounded to bfloat16 whatever the dtype."""
    dtype = model.norm.weight.dtype
    if dtype == mx.float16:
        raise NotFusedError("a residual stream that is held inside float16")
    factor = mx.array(model.config.hidden_size**0.5, mx.bfloat16).astype(dtype)
    layers = tuple(
        LayerPlan(
            input_norm=block.input_norm,
            **_four(block.attention),
            q_norm=block.attention.q_norm,
            k_norm=block.attention.k_norm,
            rope=block.attention.rope,
            window=block.attention.window,
            scale=block.attention.config.query_pre_attn_scalar**-0.5,
            attention_norm=block.attention_norm,
            mlp_input_norm=block.mlp_input_norm,
            **_gated(block.mlp),
            mlp_norm=block.mlp_norm,
        )
        for block in model.blocks
    )

    def embed(ids_BL: mx.array) -> mx.array:
        x_BLD: mx.array = model.embedding(ids_BL)
        return x_BLD * factor.astype(x_BLD.dtype)  # rows of some packed embeddings are bfloat16 whatever the dtype

    return _plan(model, embed, layers)


FAMILIES: Final[Mapping[str, Callable[[Any], Plan]]] = {
    "gemma": _gemma,
    "gemma3_text": _gemma3,
    "llama": _pre_norm,  # and mistral, which is llama's model
    "qwen2": _pre_norm,
    "qwen3": _pre_norm,
    "smollm3": _pre_norm,
}
ACTIVATIONS: Final[Mapping[Any, int]] = {swiglu: SWIGLU, geglu_approx: GEGLU_APPROX, geglu: GEGLU}


def _scaled(model: Any, factor: float) -> Callable[[mx.array], mx.array]:  # noqa: ANN401
    """An embedding times a number, which takes its dtype."""

    def embed(ids_BL: mx.array) -> mx.array:
        x_BLD: mx.array = model.embedding(ids_BL) * factor
        return x_BLD

    return embed


def _four(attention: Any) -> dict[str, Any]:  # noqa: ANN401
    """Four projections of their own."""
    projections = {name: Outputs(linear=getattr(attention, name)) for name in ("q", "k", "v")}
    return {**projections, "o": attention.o}


def _grouped(attention: Any) -> dict[str, Any]:  # noqa: ANN401
    """The attention that most families share."""
    if type(attention) is not GroupedAttention:
        raise NotFusedError(f"attention of the kind {type(attention).__name__}")
    names = ("q_norm", "k_norm", "rope", "window", "scale")
    return {**_four(attention), **{name: getattr(attention, name) for name in names}}


def _gated(mlp: Any) -> dict[str, Any]:  # noqa: ANN401
    if type(mlp) is not GatedMLP:
        raise NotFusedError(f"an MLP of the kind {type(mlp).__name__}")
    return {
        "gate": Outputs(linear=mlp.gate),
        "up": Outputs(linear=mlp.up),
        "down": mlp.down,
        "activation": _activation(mlp.activation),
    }


def _activation(activation: Any) -> int:  # noqa: ANN401
    if activation not in ACTIVATIONS:
        raise NotFusedError(f"the activation {getattr(activation, '__name__', activation)}")
    return ACTIVATIONS[activation]


def _plan(model: Any, embed: Callable[[mx.array], mx.array], layers: tuple[LayerPlan, ...]) -> Plan:  # noqa: ANN401
    weight = model.norm.weight
    return Plan(
        layers=layers,
        norm=model.norm,
        embed=embed,
        width=weight.shape[0],
        head_width=model.head_width,
        dtype=weight.dtype,
    )


def _check(layer: LayerPlan, plan: Plan) -> None:
    for linear in layer.linears:
        if not isinstance(linear.weight, FastMatrix):
            raise NotFusedError(f"{linear.path} has no compiled product")
        if laid_out_for(linear.weight.laid(), plan.dtype) is None or (
            linear.bias is not None and linear.bias.dtype != plan.dtype
        ):
            raise NotFusedError(f"{linear.path} is not of the dtype of the norms")
    for norm in (*layer.norms, plan.norm):
        if norm.weight is None or norm.weight.dtype != plan.dtype:
            raise NotFusedError(f"{norm.path} has no weight of the model's dtype")
        if isinstance(norm, LayerNorm) and norm.bias is not None and norm.bias.dtype != plan.dtype:
            raise NotFusedError(f"{norm.path} has a bias of another dtype than the model's")
    if layer.rope is not None and layer.rope.width % 2:
        raise NotFusedError("a rotation of an odd number of elements")
    if plan.dtype not in NAMES:
        raise NotFusedError(f"activations of {plan.dtype}")
