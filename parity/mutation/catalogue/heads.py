"""Faults of heads and biases: query heads that read the wrong keys, and what is added to a projection."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

from engine.cache.protocol import PackedHeads
from parity.mutation.changes import exchanged, rolled, times, to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import Plant, edit, swap

HEAD: Final = 64  # width of a head in the tiny models


def in_turn(right: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Query head h reads KV head h modulo their number, where h * K // H is meant."""

    def wrong(q_BHLE: mx.array, keys: Any, *rest: Any, **options: Any) -> mx.array:  # noqa: ANN401 - plain or packed heads
        H = q_BHLE.shape[1]
        K = keys.weight.shape[1] if isinstance(keys, PackedHeads) else keys.shape[1]
        order = [h for k in range(K) for h in range(k, H, K)]
        back = sorted(range(H), key=order.__getitem__)
        return mx.take(right(mx.take(q_BHLE, mx.array(order), axis=1), keys, *rest, **options), mx.array(back), axis=1)

    return wrong


def reversed_heads(right: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Values of the KV heads in the opposite order, keys as they are."""
    return lambda q, keys, values, **options: right(q, keys, values[:, ::-1], **options)


def tiled(right: Callable[..., Any]) -> Callable[..., Any]:
    """Value head h of the delta rule reads query head h modulo their number."""

    def wrong(q: mx.array, k: mx.array, v: mx.array, *rest: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
        copies = (1, 1, v.shape[2] // q.shape[2], 1)
        return right(mx.tile(q, copies), mx.tile(k, copies), v, *rest, **options)

    return wrong


GROUPING: Final = tuple(
    fault("head grouping", model, what, says=says, at=at, cases=cases, plant=plant)
    for model, what, says, at, cases, plant in (
        *(
            (
                model,
                "in-turn",
                "query heads read KV heads in turn, not group by group",
                at,
                cases,
                swap(f"{module}:attend", in_turn),
            )
            for model, module, at, cases in (
                ("llama", "engine.grouped_attention", "model.layers.0.self_attn.o_proj", taps("llama")),
                ("qwen2", "engine.grouped_attention", "model.layers.0.self_attn.o_proj", taps("qwen2")),
                ("phi3", "engine.families.phi3", "model.layers.0.self_attn.o_proj", taps("phi3")),
                ("cohere2", "engine.families.cohere2", "model.layers.0.self_attn.o_proj", taps("cohere2")),
                ("gpt_oss", "engine.families.gpt_oss", "model.layers.0.self_attn.o_proj", taps("gpt_oss")),
                ("olmo2", "engine.families.olmo2", "model.layers.0.self_attn.o_proj", taps("olmo2")),
                (
                    "qwen3_5",
                    "engine.gated_attention",
                    "language_model.model.layers.3.self_attn.o_proj",
                    taps("qwen3_5"),
                ),
                (
                    "packed",
                    "engine.grouped_attention",
                    "model.layers.0.self_attn.o_proj",
                    taps("llama", kv="kv8-g64"),
                ),
            )
        ),
        (
            "qwen3",
            "values-reversed",
            "values of the KV heads are in the opposite order",
            "model.layers.0.self_attn.o_proj",
            taps("qwen3"),
            swap("engine.grouped_attention:attend", reversed_heads),
        ),
        (
            "llama",
            "keys-of-the-other-head",
            "layer 2's key heads have each other's weights",
            "model.layers.2.self_attn.k_proj",
            taps("llama"),
            edit("blocks.2.attention.k.weight", rolled(HEAD)),
        ),
        (
            "phi3",
            "fused-projection-in-another-order",
            "the fused projection's rows are taken as keys, queries, values",
            "model.layers.1.self_attn.qkv_proj",
            taps("phi3"),
            edit("blocks.1.attention.qkv.weight", rolled(2 * HEAD)),
        ),
        (
            "qwen3_5",
            "delta-heads-tiled",
            "value heads of the delta rule read query heads in turn",
            "language_model.model.layers.0.linear_attn.norm",
            taps("qwen3_5"),
            swap("engine.gated_delta:gated_delta", tiled),
        ),
        (
            "deepseek_v3",
            "two-heads-exchanged",
            "two heads of layer 1 have each other's way out of the latent",
            "model.layers.1.self_attn.unembed_out",
            taps("deepseek_v3"),
            edit("blocks.1.attention.heads.value.weight", exchanged(2, 3)),
        ),
    )
)


def bias_fault(model: str, path: str, at: str, what: str, plant: Plant) -> Fault:
    """A fault of one bias."""
    says = {"lost": "has lost its bias", "rolled": "has its bias moved by one", "twice": "adds its bias twice"}[what]
    return fault("bias", model, f"{path}-{what}", says=f"{at} {says}", at=at, cases=taps(model), plant=plant)


BIAS: Final = (
    *(
        bias_fault(model, path.removeprefix("blocks.").replace(".", "-"), at, "lost", edit(f"{path}.bias", to(None)))
        for model, path, at in (
            ("llama_linear", "blocks.0.attention.q", "model.layers.0.self_attn.q_proj"),
            ("llama_linear", "blocks.1.attention.v", "model.layers.1.self_attn.v_proj"),
            ("llama_linear", "blocks.3.attention.o", "model.layers.3.self_attn.o_proj"),
            ("llama_linear", "blocks.2.mlp.down", "model.layers.2.mlp.down_proj"),
            ("qwen2", "blocks.0.attention.k", "model.layers.0.self_attn.k_proj"),
            ("starcoder2", "blocks.1.mlp.up", "model.layers.1.mlp.c_fc"),
            ("starcoder2", "blocks.0.input_norm", "model.layers.0.input_layernorm"),
            ("glm4_moe", "blocks.2.attention.q", "model.layers.2.self_attn.q_proj"),
            ("gpt_oss", "blocks.1.attention.o", "model.layers.1.self_attn.o_proj"),
            ("mamba2", "blocks.0.mixer.convolution", "backbone.layers.0.mixer.conv1d"),
            ("falcon_h1", "blocks.1.mixer.convolution", "model.layers.1.mamba.conv1d"),
        )
    ),
    *(
        bias_fault(model, path.removeprefix("blocks.").replace(".", "-"), at, what, edit(f"{path}.bias", change))
        for model, path, at, what, change in (
            ("granite", "blocks.0.mlp.up", "model.layers.0.mlp.up_proj", "rolled", rolled(1)),
            ("gpt_oss", "blocks.0.mlp.experts.up", "model.layers.0.mlp.experts", "rolled", rolled(1, axis=1)),
            ("starcoder2", "blocks.2.attention.v", "model.layers.2.self_attn.v_proj", "twice", times(2)),
        )
    ),
    fault(
        "bias",
        "gpt_oss",
        "sinks-lost",
        says="layer 2 attends without sinks",
        at="model.layers.2.self_attn.o_proj",
        cases=taps("gpt_oss"),
        plant=edit("blocks.2.attention.sinks_H", to(None)),
    ),
    fault(
        "bias",
        "gpt_oss",
        "sinks-of-the-next-head",
        says="heads of layer 0 have each other's sinks",
        at="model.layers.0.self_attn.o_proj",
        cases=taps("gpt_oss"),
        plant=edit("blocks.0.attention.sinks_H", rolled(1)),
    ),
)

FAULTS: Final[tuple[Fault, ...]] = (*GROUPING, *BIAS)
