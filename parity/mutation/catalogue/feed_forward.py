"""Faults of the feed-forward layers: activations, and gates in the wrong place."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

from engine.activation import clipped_swiglu, geglu, geglu_approx, gelu_approx, silu, swiglu
from parity.mutation.changes import exchanged, to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap

Gated = Callable[[mx.array, mx.array], mx.array]
QWEN3_5: Final = "language_model.model"


def gate_for_up(right: Gated) -> Gated:
    """Gate and up in each other's place."""
    return lambda gate, up: right(up, gate)


def linear_gate(_: Gated) -> Gated:
    """The gate without its activation."""
    return lambda gate, up: gate * up


def other_rounding(_: Gated) -> Gated:
    """silu(gate) * up with the products in another order: the same on paper."""
    return lambda gate, up: (gate * up) * mx.sigmoid(gate)


def limited(limit: float, slope: float = 1.702, shift: float = 1.0) -> Callable[[Gated], Gated]:
    """The clipped activation with other numbers."""

    def activation(gate: mx.array, up: mx.array) -> mx.array:
        gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
        return (up + shift) * (gate * mx.sigmoid(slope * gate))

    return lambda _: activation


def unsigned(x: mx.array) -> mx.array:
    """relu without its square."""
    return mx.maximum(x, 0)


IN_LAYERS: Final = tuple(
    fault(
        "activation",
        model,
        f"{path.removeprefix('blocks.').replace('.', '-')}-{what}",
        says=f"layer {path.split('.')[1]} {says}",
        at=at,
        cases=taps(model),
        plant=edit(f"{path}.activation", change),
    )
    for model, path, at, what, says, change in (
        ("llama", "blocks.0.mlp", "model.layers.0.mlp.down_proj", "gelu", "gates by gelu", to(geglu)),
        ("llama", "blocks.1.mlp", "model.layers.1.mlp.down_proj", "exchanged", "gates by up", gate_for_up),
        ("llama", "blocks.3.mlp", "model.layers.3.mlp.down_proj", "linear", "gates without activation", linear_gate),
        (
            "qwen2",
            "blocks.2.mlp",
            "model.layers.2.mlp.down_proj",
            "order",
            "multiplies in another order",
            other_rounding,
        ),
        (
            "olmo2",
            "blocks.1.mlp",
            "model.layers.1.mlp.down_proj",
            "tanh",
            "gates by the tanh form of gelu",
            to(geglu_approx),
        ),
        (
            "gemma",
            "blocks.0.mlp",
            "model.layers.0.mlp.down_proj",
            "tanh",
            "takes the tanh form of gelu",
            to(geglu_approx),
        ),
        ("gemma2", "blocks.3.mlp", "model.layers.3.mlp.down_proj", "erf", "takes the erf form of gelu", to(geglu)),
        ("gemma3_text", "blocks.1.mlp", "model.layers.1.mlp.down_proj", "silu", "gates by silu", to(swiglu)),
        ("phi3", "blocks.0.mlp", "model.layers.0.mlp.down_proj", "halves", "takes up for the first half", gate_for_up),
        ("lfm2", "blocks.2.mlp", "model.layers.2.feed_forward.w2", "exchanged", "gates by w3", gate_for_up),
        (
            "qwen3_moe",
            "blocks.1.mlp.experts",
            "model.layers.1.mlp.switch_mlp",
            "gelu",
            "has experts of gelu",
            to(geglu),
        ),
        (
            "mixtral",
            "blocks.0.mlp.experts",
            "model.layers.0.block_sparse_moe.switch_mlp",
            "exchanged",
            "has experts that gate by up",
            gate_for_up,
        ),
        (
            "deepseek_v3",
            "blocks.1.mlp.shared",
            "model.layers.1.mlp.shared_experts.down_proj",
            "linear",
            "has shared experts without activation",
            linear_gate,
        ),
        (
            "gpt_oss",
            "blocks.0.mlp.experts",
            "model.layers.0.mlp.experts",
            "slope",
            "has a slope of 1.7",
            limited(7.0, 1.7),
        ),
        (
            "gpt_oss",
            "blocks.1.mlp.experts",
            "model.layers.1.mlp.experts",
            "no-one",
            "adds no one to up",
            limited(7.0, shift=0.0),
        ),
        ("gpt_oss", "blocks.2.mlp.experts", "model.layers.2.mlp.experts", "limit", "clips at 0.5", limited(0.5)),
        ("qwen3_5", "blocks.0.mlp", f"{QWEN3_5}.layers.0.mlp.down_proj", "exchanged", "gates by up", gate_for_up),
    )
)


def on_gate(right: Callable[..., Any]) -> Callable[..., Any]:
    """The norm's output gates, and the gate is gated."""
    return lambda gate, normed: right(normed, gate)


ELSEWHERE: Final = tuple(
    fault("activation", part, what, says=says, at=at, cases=cases, plant=plant)
    for part, what, says, at, cases, plant in (
        (
            "starcoder2",
            "tanh",
            "the tanh form of gelu takes the place of the erf form",
            "model.layers.0.mlp.c_proj",
            taps("starcoder2"),
            swap("engine.families.starcoder2:gelu", to(gelu_approx)),
        ),
        (
            "nemotron_h",
            "relu",
            "relu is not squared",
            "backbone.layers.1.mixer.down_proj",
            taps("nemotron_h"),
            swap("engine.ungated_moe:relu2", to(unsigned)),
        ),
        (
            "gated_delta",
            "no-silu",
            "what is convolved goes on without silu",
            f"{QWEN3_5}.layers.0.linear_attn.norm",
            taps("qwen3_5"),
            swap("engine.gated_delta:silu", lambda _: lambda x: x),
        ),
        (
            "gated_delta",
            "gate-exchanged",
            "the norm's output gates, and its gate is gated",
            f"{QWEN3_5}.layers.0.linear_attn.norm",
            taps("qwen3_5"),
            swap("engine.norm:swiglu", on_gate),
        ),
        (
            "state_space",
            "no-silu",
            "what is convolved goes on without silu",
            "backbone.layers.0.mixer.norm",
            taps("mamba2"),
            swap("engine.state_space_mixer:silu", lambda _: lambda x: x),
        ),
        (
            "state_space",
            "gate-exchanged",
            "what was scanned gates, and the gate is gated",
            "model.layers.0.mamba.out_proj",
            taps("falcon_h1"),
            swap("engine.state_space_mixer:swiglu", on_gate),
        ),
        (
            "clipped_swiglu",
            "halved-gates",
            "gates of the clipped activation are halved",
            "model.layers.0.mlp.experts",
            taps("gpt_oss"),
            swap("engine.families.gpt_oss:clipped_swiglu", lambda _: lambda gate, up: clipped_swiglu(gate / 2, up)),
        ),
        (
            "gated_convolution",
            "gates-exchanged",
            "the gates before and after the convolution are in each other's place",
            "model.layers.0.conv.in_proj",
            taps("lfm2"),
            edit("blocks.0.operator.into.weight", lambda weight: _thirds_exchanged(weight)),  # noqa: PLW0108
        ),
        (
            "sigmoid",
            "silu-rounds-last",
            "silu is taken as a quotient",
            "model.layers.0.self_attn.q_conv",
            taps("kimi_linear"),
            swap("engine.delta_attention:silu", lambda _: lambda x: x / (1 + mx.exp(-x))),
        ),
        (
            "relu2",
            "signed",
            "negative inputs are squared too",
            "backbone.layers.1.mixer.down_proj",
            taps("nemotron_h"),
            swap("engine.ungated_moe:relu2", to(mx.square)),
        ),
        (
            "silu",
            "twice",
            "silu is applied twice",
            "model.layers.0.mlp.down_proj",
            taps("qwen3"),
            edit("blocks.0.mlp.activation", lambda right: lambda gate, up: right(silu(gate), up)),
        ),
    )
)


def _thirds_exchanged(weight: mx.array) -> mx.array:
    """The first and the second third of the rows in each other's place."""
    parts: mx.array = exchanged(0, 1)(weight.reshape(3, -1, weight.shape[1])).reshape(weight.shape)
    return parts


FAULTS: Final[tuple[Fault, ...]] = (*IN_LAYERS, *ELSEWHERE)
