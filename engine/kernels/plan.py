"""What a family's model computes, in the terms of the fused step; or why the step cannot compute it.

Guarantees: a family is in the table only if its blocks are of the kind that its entry says; everything in a block that the step
has no part for is a reason, never ignored. A plan holds the model's own layers and copies nothing. Whether plan and model give
the same bits is not believed: `engine.kernels.level` compares them before the step is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import geglu_approx, swiglu
from engine.grouped_attention import GroupedAttention
from engine.kernels.fields import GEGLU_APPROX, SWIGLU
from engine.kernels.layout import NAMES, laid_out_for
from engine.kernels.matrix import FastMatrix
from engine.linear import Linear
from engine.mlp import GatedMLP
from engine.norm import RMSNorm
from engine.rope import Rope


class NotFusedError(Exception):
    """The fused step has no part for something in the model; the message says for what."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPlan:
    """One block: x + [norm](attention(norm(x))), then x + [norm](mlp(norm(x))).

    Attributes:
        input_norm: Before the attention.
        q, k, v, o: Projections.
        q_norm, k_norm: Of each head's query and key, or None.
        rope: Rotation, or None.
        window: Positions that a query sees, or None for all.
        scale: Factor on the scores.
        attention_norm: Of the attention's output, or None.
        mlp_input_norm: Before the MLP.
        gate, up, down: Projections.
        activation: Of (gate, up): `SWIGLU` or `GEGLU_APPROX` of `engine.kernels.fields`.
        mlp_norm: Of the MLP's output, or None.
    """

    input_norm: RMSNorm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rope: Rope | None
    window: int | None
    scale: float
    attention_norm: RMSNorm | None
    mlp_input_norm: RMSNorm
    gate: Linear
    up: Linear
    down: Linear
    activation: int
    mlp_norm: RMSNorm | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A whole model up to its hidden states.

    Attributes:
        layers: In order.
        norm: The last one.
        embed: From ids [B, L] to what the first block is given, [B, L, D].
        width: D.
        head_width: E.
        dtype: Of the activations.
    """

    layers: tuple[LayerPlan, ...]
    norm: RMSNorm
    embed: Callable[[mx.array], mx.array]
    width: int
    head_width: int
    dtype: mx.Dtype


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


def _pre_norm(model: Any) -> Plan:  # noqa: ANN401
    """Blocks of `input_norm`, `attention`, `post_norm` and `mlp`, the embedding as it is."""
    return _plan(model, model.embedding, tuple(_pre_norm_layer(block) for block in model.blocks))


def _pre_norm_layer(block: Any) -> LayerPlan:  # noqa: ANN401
    attention, mlp = block.attention, block.mlp
    if type(attention) is not GroupedAttention:
        raise NotFusedError(f"attention of the kind {type(attention).__name__}")
    return LayerPlan(
        input_norm=block.input_norm,
        q=attention.q,
        k=attention.k,
        v=attention.v,
        o=attention.o,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        rope=attention.rope,
        window=attention.window,
        scale=attention.scale,
        attention_norm=None,
        mlp_input_norm=block.post_norm,
        **_gated(mlp),
        mlp_norm=None,
    )


def _gemma3(model: Any) -> Plan:  # noqa: ANN401
    """Norms on both sides of each half, and a factor on the embedding, which is rounded to bfloat16 whatever the dtype."""
    dtype = model.norm.weight.dtype
    if dtype == mx.float16:
        raise NotFusedError("a residual stream that is held inside float16")
    factor = mx.array(model.config.hidden_size**0.5, mx.bfloat16).astype(dtype)
    layers = tuple(
        LayerPlan(
            input_norm=block.input_norm,
            q=block.attention.q,
            k=block.attention.k,
            v=block.attention.v,
            o=block.attention.o,
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
    "gemma3_text": _gemma3,
    "llama": _pre_norm,  # and mistral, which is llama's model
    "qwen2": _pre_norm,
    "qwen3": _pre_norm,
    "smollm3": _pre_norm,
}
ACTIVATIONS: Final[Mapping[Any, int]] = {swiglu: SWIGLU, geglu_approx: GEGLU_APPROX}


def _gated(mlp: Any) -> dict[str, Any]:  # noqa: ANN401
    if type(mlp) is not GatedMLP:
        raise NotFusedError(f"an MLP of the kind {type(mlp).__name__}")
    if mlp.activation not in ACTIVATIONS:
        raise NotFusedError(f"the activation {getattr(mlp.activation, '__name__', mlp.activation)}")
    return {"gate": mlp.gate, "up": mlp.up, "down": mlp.down, "activation": ACTIVATIONS[mlp.activation]}


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
    for linear in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down):
        if not isinstance(linear.weight, FastMatrix):
            raise NotFusedError(f"{linear.path} has no compiled product")
        if laid_out_for(linear.weight.laid(), plan.dtype) is None or (
            linear.bias is not None and linear.bias.dtype != plan.dtype
        ):
            raise NotFusedError(f"{linear.path} is not of the dtype of the norms")
    norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.attention_norm, layer.mlp_input_norm, layer.mlp_norm)
    for norm in norms:
        if norm is not None and (norm.weight is None or norm.weight.dtype != plan.dtype):
            raise NotFusedError(f"{norm.path} has no weight of the model's dtype")
    if layer.rope is not None and layer.rope.width % 2:
        raise NotFusedError("a rotation of an odd number of elements")
    if plan.dtype not in NAMES:
        raise NotFusedError(f"activations of {plan.dtype}")
