"""Faults of weights: one ULP in one of them, layers and heads in the wrong place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from parity.mutation.changes import exchanged, fields, one_ulp, rolled, times
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap

Q4: Final = taps("llama-q4g32")


def largest(array: mx.array) -> mx.array:
    """The element of the largest magnitude one ULP larger."""
    flat = np.abs(np.array(array.astype(mx.float32)))
    index = np.unravel_index(int(flat.argmax()), flat.shape)
    changed: mx.array = one_ulp(*(int(i) for i in index))(array)
    return changed


ULP: Final = tuple(
    fault(
        "one ULP",
        model,
        path.removeprefix("blocks.").replace(".", "-"),
        says=f"one weight of {at} is one ULP off",
        at=at,
        cases=cases,
        plant=edit(path, change),
    )
    for model, path, at, cases, change in (
        ("llama", "norm.weight", "model.norm", taps("llama"), one_ulp(7)),
        ("llama", "blocks.0.input_norm.weight", "model.layers.0.input_layernorm", taps("llama"), one_ulp(3)),
        ("qwen3", "blocks.2.attention.q_norm.weight", "model.layers.2.self_attn.q_norm", taps("qwen3"), one_ulp(11)),
        (
            "gemma2",
            "blocks.1.mlp_norm.weight",
            "model.layers.1.post_feedforward_layernorm",
            taps("gemma2"),
            one_ulp(118),
        ),
        ("cohere2", "blocks.0.norm.weight", "model.layers.0.input_layernorm", taps("cohere2"), one_ulp(20)),
        ("qwen2", "blocks.0.attention.q.bias", "model.layers.0.self_attn.q_proj", taps("qwen2"), largest),
        ("starcoder2", "blocks.1.mlp.down.bias", "model.layers.1.mlp.c_proj", taps("starcoder2"), one_ulp(116)),
        ("llama", "blocks.1.mlp.down.weight", "model.layers.1.mlp.down_proj", taps("llama"), one_ulp(123, 107)),
        ("llama", "blocks.3.attention.o.weight", "model.layers.3.self_attn.o_proj", taps("llama"), one_ulp(83, 213)),
        ("llama", "head.weight", "lm_head", taps("llama"), largest),
        ("mamba2", "blocks.0.mixer.convolution.weight", "backbone.layers.0.mixer.conv1d", taps("mamba2"), largest),
        (
            "qwen3",
            "blocks.0.attention.v.weight",
            "model.layers.0.self_attn.v_proj",
            taps("qwen3", dtype="bf16"),
            one_ulp(88, 65),
        ),
        (
            "gemma3_text",
            "blocks.1.mlp.gate.weight",
            "model.layers.1.mlp.gate_proj",
            taps("gemma3_text", dtype="bf16"),
            largest,
        ),
        (
            "gpt_oss",
            "blocks.0.post_norm.weight",
            "model.layers.0.post_attention_layernorm",
            taps("gpt_oss"),
            one_ulp(5),
        ),
        (
            "qwen3_5",
            "blocks.0.attention.mixer.A_log",
            "language_model.model.layers.0.linear_attn.norm",
            taps("qwen3_5"),
            largest,
        ),
        ("llama-q4g32", "blocks.0.attention.k.weight.scales", "model.layers.0.self_attn.k_proj", Q4, largest),
    )
)


FAINT: Final = tuple(
    fault(
        "one ULP",
        model,
        what,
        says=f"one number of {at} is one ULP off, which most cases round away",
        at=at,
        cases=cases,
        plant=edit(path, change),
    )
    for model, what, path, at, cases, change in (
        (
            "llama",
            "3-attention-o-weight-largest",
            "blocks.3.attention.o.weight",
            "model.layers.3.self_attn.o_proj",
            (taps("llama"), "llama-tiny/f32/fp/forced/p32-mutation-tail-split"),
            largest,
        ),
        (
            "llama",
            "2-slow-period",
            "blocks.2.attention.rope",
            "model.layers.2.self_attn.o_proj",
            (taps("llama"), "llama-tiny/f32/fp/forced/p24-mutation-tail-split"),
            fields(periods=one_ulp(20)),
        ),
        (
            "gpt_oss",
            "0-mlp-router-bias-largest",
            "blocks.0.mlp.router.bias",
            "model.layers.0.mlp.router",
            (taps("gpt_oss"), "gpt_oss-tiny/f32/fp/forced/p40-mutation-tail-split"),
            largest,
        ),
    )
)

SWAPPED: Final = tuple(
    fault("swapped layers", model, what, says=says, at=at, cases=taps(model), plant=edit("blocks", change))
    for model, what, says, at, change in (
        *(
            (
                model,
                f"{first}-and-{second}",
                f"layers {first} and {second} are in each other's place",
                at,
                exchanged(first, second),
            )
            for model, first, second, at in (
                ("llama", 0, 1, "model.layers.0.input_layernorm"),
                ("gemma2", 0, 3, "model.layers.0.input_layernorm"),
                ("qwen3_moe", 1, 2, "model.layers.1.input_layernorm"),
                ("mamba2", 1, 2, "backbone.layers.1.norm"),
                ("qwen3_5", 0, 1, "language_model.model.layers.0.input_layernorm"),
                ("olmo2", 0, 2, "model.layers.0.self_attn.q_proj"),
                ("falcon_h1", 2, 3, "model.layers.2.input_layernorm"),
                ("gemma3_text", 0, 1, "model.layers.0.input_layernorm"),
            )
        ),
        (
            "qwen2",
            "queries-of-the-next-layer",
            "layer 1's queries have layer 2's weights",
            "model.layers.1.self_attn.q_proj",
            lambda blocks: _with_other_queries(blocks, 1, 2),
        ),
    )
)


def _with_other_queries(blocks: tuple[Any, ...], to_layer: int, from_layer: int) -> tuple[Any, ...]:
    """Blocks in which one layer's query projection has another's weight."""
    here, there = blocks[to_layer], blocks[from_layer]
    query = replace(here.attention.q, weight=there.attention.q.weight)
    changed = replace(here, attention=replace(here.attention, q=query))
    return (*blocks[:to_layer], changed, *blocks[to_layer + 1 :])


def head_of(change: Callable[[mx.array], mx.array]) -> Callable[[Any], Any]:
    """A tied head whose logits are changed."""
    return lambda right: lambda self, x: change(right(self, x))


TIED: Final = (
    *(
        fault(
            "tied head",
            model,
            what,
            says=says,
            at="logits",
            cases=taps(model),
            plant=swap("engine.linear:Embedding.as_head", head_of(change)),
        )
        for model, what, says, change in (
            ("qwen2", "rows-one-off", "the tied head is one row off", rolled(1, axis=-1)),
            ("gemma", "scaled-like-the-embedding", "the tied head is scaled like the embedding", times(128**0.5)),
            ("starcoder2", "rows-reversed", "the tied head's rows are reversed", lambda logits: logits[..., ::-1]),
        )
    ),
    fault(
        "tied head",
        "falcon_h1",
        "factor-ignored",
        says="a tied head carries the embedding's multiplier",
        at="logits",
        cases=taps("falcon_h1"),
        plant=edit("config", fields(lm_head_multiplier=lambda factor: factor * 2)),
    ),
    fault(
        "tied head",
        "llama",
        "of-other-tokens",
        says="the head's rows are one token off",
        at="lm_head",
        cases=taps("llama"),
        plant=edit("head.weight", rolled(1)),
    ),
    fault(
        "tied head",
        "gemma3_text",
        "transposed-halves",
        says="halves of the head are in each other's place",
        at="lm_head",
        cases=taps("gemma3_text"),
        plant=edit("head.weight", rolled(256)),
    ),
)

FAULTS: Final[tuple[Fault, ...]] = (*ULP, *FAINT, *SWAPPED, *TIED)
