"""The families that have a fused step: how the blocks of each are a plan.

Guarantees: a family is in the table only if its blocks are of the kind that its entry says; everything in a block that the step
has no part for is a reason, never ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx

from engine.families import qwen3_moe
from engine.kernels.fields import GELU, HIGHEST, PROBABLE
from engine.kernels.plan import DensePlan, ExpertsPlan, LayerPlan, NotFusedError, Outputs, Plan
from engine.kernels.plan_checks import check_layer
from engine.kernels.plan_parts import cut, experts, four, gated, grouped, scaled, whole_plan


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
        check_layer(layer, plan)
    if plan.embed(mx.array([[0]])).dtype != plan.dtype:
        raise NotFusedError("an embedding of another dtype than the norms")
    return plan


def _pre_norm(
    model: Any,  # noqa: ANN401
    *,
    embed: Callable[[mx.array], mx.array] | None = None,
    multiplier: float | None = None,
    mlp: Callable[[Any], DensePlan | ExpertsPlan] = gated,
) -> Plan:
    """Blocks of `input_norm`, `attention`, `post_norm` and `mlp`, the embedding as it is where nothing else is said."""
    layers = tuple(
        LayerPlan(
            input_norm=block.input_norm,
            **grouped(block.attention),
            mlp_input_norm=block.post_norm,
            mlp=mlp(block.mlp),
            multiplier=multiplier,
        )
        for block in model.blocks
    )
    return whole_plan(model, embed or model.embedding, layers)


def _gemma(model: Any) -> Plan:  # noqa: ANN401
    """Pre-norm blocks behind a scaled embedding."""
    return _pre_norm(model, embed=scaled(model, model.config.hidden_size**0.5))


def _gemma3(model: Any) -> Plan:  # noqa: ANN401
    """Norms on both sides of each half, and a factor on the embedding, which is rounded to bfloat16 whatever the dtype."""
    dtype = model.norm.weight.dtype
    if dtype == mx.float16:
        raise NotFusedError("a residual stream that is held inside float16")
    factor = mx.array(model.config.hidden_size**0.5, mx.bfloat16).astype(dtype)
    layers = tuple(
        LayerPlan(
            input_norm=block.input_norm,
            **four(block.attention),
            q_norm=block.attention.q_norm,
            k_norm=block.attention.k_norm,
            rope=block.attention.rope,
            window=block.attention.window,
            scale=block.attention.config.query_pre_attn_scalar**-0.5,
            attention_norm=block.attention_norm,
            mlp_input_norm=block.mlp_input_norm,
            mlp=gated(block.mlp),
            mlp_norm=block.mlp_norm,
        )
        for block in model.blocks
    )

    def embed(ids_BL: mx.array) -> mx.array:
        x_BLD: mx.array = model.embedding(ids_BL)
        return x_BLD * factor.astype(x_BLD.dtype)  # rows of some packed embeddings are bfloat16 whatever the dtype

    return whole_plan(model, embed, layers)


def _gemma2(model: Any) -> Plan:  # noqa: ANN401
    """Norms on both sides of each half, and soft-capped scores; the caps of the logits are the model's."""
    config = model.config
    layers = tuple(
        LayerPlan(
            input_norm=block.input_norm,
            **four(block.attention),
            rope=block.attention.rope,
            scale=1.0 / config.query_pre_attn_scalar**0.5,
            cap=config.attn_logit_softcapping,
            attention_norm=block.attention_norm,
            mlp_input_norm=block.mlp_input_norm,
            mlp=gated(block.mlp),
            mlp_norm=block.mlp_norm,
        )
        for block in model.blocks
    )
    return whole_plan(model, scaled(model, config.hidden_size**0.5), layers)


def _granite(model: Any) -> Plan:  # noqa: ANN401
    """Pre-norm blocks whose branches are multiplied, behind a scaled embedding; the scale of the logits is the model's."""
    multiplier = model.config.residual_multiplier
    return _pre_norm(model, embed=scaled(model, model.config.embedding_multiplier), multiplier=multiplier)


def _minicpm(model: Any) -> Plan:  # noqa: ANN401
    """As granite; what divides hidden states before the head is the model's."""
    return _pre_norm(model, embed=scaled(model, model.config.scale_emb), multiplier=model.config.branch_scale)


def _mistral3(model: Any) -> Plan:  # noqa: ANN401
    """Its text model's blocks, which are llama's or have an attention of their own; all positions are kept."""
    plan = _pre_norm(model)
    return replace(plan, layers=tuple(replace(layer, ring=False) for layer in plan.layers))


def _glm4(model: Any) -> Plan:  # noqa: ANN401
    """Norms on both sides of each half."""
    layers = tuple(
        LayerPlan(
            input_norm=block.attention_norm,
            **grouped(block.attention),
            attention_norm=block.after_attention,
            mlp_input_norm=block.mlp_norm,
            mlp=gated(block.mlp),
            mlp_norm=block.after_mlp,
        )
        for block in model.blocks
    )
    return whole_plan(model, model.embedding, layers)


def _phi3(model: Any) -> Plan:  # noqa: ANN401
    """Pre-norm blocks with joined projections."""
    E = model.head_width
    layers = []
    for block in model.blocks:
        attention = block.attention
        q, k, v = cut(attention.qkv, attention.heads * E, attention.kv_heads * E, attention.kv_heads * E)
        layers.append(
            LayerPlan(
                input_norm=block.input_norm,
                q=q,
                k=k,
                v=v,
                o=attention.o,
                rope=attention.rope,
                scale=E**-0.5,
                mlp_input_norm=block.post_norm,
                mlp=gated(block.mlp),
            )
        )
    return whole_plan(model, model.embedding, tuple(layers))


def _starcoder2(model: Any) -> Plan:  # noqa: ANN401
    """Pre-norm blocks with centred norms and an MLP without a gate."""
    layers = tuple(
        LayerPlan(
            input_norm=block.input_norm,
            **grouped(block.attention),
            mlp_input_norm=block.post_norm,
            mlp=DensePlan(gate=Outputs(linear=block.mlp.up), up=None, down=block.mlp.down, activation=GELU),
        )
        for block in model.blocks
    )
    return whole_plan(model, model.embedding, layers)


def _cohere2(model: Any) -> Plan:  # noqa: ANN401
    """Parallel blocks behind one centred norm each; the scale of the logits is the model's."""
    if model.norm.weight.dtype == mx.float16:
        raise NotFusedError("attention in float32 inside float16")
    layers = tuple(
        LayerPlan(
            input_norm=block.norm,
            **four(block.attention),
            rope=block.attention.rope,
            window=block.attention.window,
            scale=block.attention.head_width**-0.5,
            mlp_input_norm=None,
            mlp=gated(block.mlp),
            parallel=True,
        )
        for block in model.blocks
    )
    return whole_plan(model, model.embedding, layers)


def _olmo(model: Any) -> Plan:  # noqa: ANN401
    """Norms of what each half puts out, and of all heads at once; olmo3 has windows besides."""
    layers = tuple(
        LayerPlan(
            input_norm=None,
            **four(block.attention),
            q_norm=block.attention.q_norm,
            k_norm=block.attention.k_norm,
            whole_norms=True,
            rope=block.attention.rope,
            window=getattr(block.attention, "window", None),
            scale=block.attention.head_width**-0.5,
            attention_norm=block.attention_norm,
            mlp_input_norm=None,
            mlp=gated(block.mlp),
            mlp_norm=block.mlp_norm,
        )
        for block in model.blocks
    )
    return whole_plan(model, model.embedding, layers)


def _qwen3_moe(model: Any) -> Plan:  # noqa: ANN401
    """Pre-norm blocks with experts in some or all."""

    def mlp(layer: Any) -> DensePlan | ExpertsPlan:  # noqa: ANN401
        if type(layer) is not qwen3_moe.ExpertMLP:
            return gated(layer)
        return experts(layer, kind=PROBABLE, normalised=layer.normalised)

    return _pre_norm(model, mlp=mlp)


def _mixtral(model: Any) -> Plan:  # noqa: ANN401
    """Pre-norm blocks with experts, whose shares are a softmax over the chosen."""
    return _pre_norm(model, mlp=lambda layer: experts(layer, kind=HIGHEST, normalised=False))


FAMILIES: Final[Mapping[str, Callable[[Any], Plan]]] = {
    "cohere2": _cohere2,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "granite": _granite,
    "llama": _pre_norm,  # and mistral, which is llama's model
    "minicpm": _minicpm,
    "mistral3": _mistral3,
    "mixtral": _mixtral,
    "olmo2": _olmo,
    "olmo3": _olmo,
    "phi3": _phi3,
    "qwen2": _pre_norm,
    "qwen3": _pre_norm,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _pre_norm,
    "starcoder2": _starcoder2,
}
