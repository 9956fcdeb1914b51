"""Faults of factors: on scores, embeddings, branches and logits; and soft caps."""

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from parity.mutation.changes import fields, plus, times, to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap


def queries_scaled_once(
    right: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]],
) -> Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]:
    """Queries of length 1 where E^-0.5 is meant."""

    def wrong(q_BLHE: mx.array, k_BLHE: mx.array) -> tuple[mx.array, mx.array]:
        q, k = right(q_BLHE, k_BLHE)
        return q * q_BLHE.shape[-1] ** 0.5, k

    return wrong


SCALE: Final = tuple(
    fault("scale", model, what, says=says, at=at, cases=taps(model), plant=plant)
    for model, what, says, at, plant in (
        (
            "llama",
            "scores-a-thousandth-off",
            "layer 0's scores are 0.1 % too large",
            "model.layers.0.self_attn.o_proj",
            edit("blocks.0.attention.scale", times(1.001)),
        ),
        (
            "qwen2",
            "scores-by-the-whole-width",
            "layer 3's scores are divided by the root of the model's width",
            "model.layers.3.self_attn.o_proj",
            edit("blocks.3.attention.scale", to(256**-0.5)),
        ),
        (
            "granite",
            "attention-multiplier",
            "layer 1 divides by the root of a head's width where attention_multiplier belongs",
            "model.layers.1.self_attn.o_proj",
            edit("blocks.1.attention.scale", to(64**-0.5)),
        ),
        (
            "granite",
            "embedding-multiplier",
            "the embedding is not multiplied",
            "model.layers.0.input_layernorm",
            edit("config", fields(embedding_multiplier=to(1.0))),
        ),
        (
            "granite",
            "residual-multiplier",
            "layer 1 adds its branches unscaled",
            "model.layers.1.post_attention_layernorm",
            edit("blocks.1.multiplier", to(1.0)),
        ),
        (
            "granite",
            "logits-scaling",
            "logits are multiplied by logits_scaling",
            "logits",
            edit("config", fields(logits_scaling=lambda scale: 1 / scale)),
        ),
        (
            "gemma2",
            "query-scalar",
            "layer 2 scales by the head's width, not by query_pre_attn_scalar",
            "model.layers.2.self_attn.o_proj",
            edit("blocks.2.attention.config", fields(query_pre_attn_scalar=to(64))),
        ),
        (
            "gemma3_text",
            "query-scalar",
            "layer 0 scales by the head's width, not by query_pre_attn_scalar",
            "model.layers.0.self_attn.o_proj",
            edit("blocks.0.attention.config", fields(query_pre_attn_scalar=to(64.0))),
        ),
        (
            "gemma3_text",
            "embedding-of-another-width",
            "the embedding's factor is that of one element more",
            "model.layers.0.input_layernorm",
            edit("config", fields(hidden_size=plus(1))),
        ),
        (
            "gemma",
            "no-embedding-factor",
            "the embedding is not multiplied by the root of the width",
            "model.layers.0.input_layernorm",
            edit("config", fields(hidden_size=to(1))),
        ),
        (
            "minicpm",
            "scale-emb",
            "the embedding's factor is 11 for 12",
            "model.layers.0.input_layernorm",
            edit("config", fields(scale_emb=plus(-1))),
        ),
        (
            "minicpm",
            "depth",
            "layer 0's branches are scaled for one layer fewer",
            "model.layers.0.post_attention_layernorm",
            edit("blocks.0.scale", to(1.4 / 3**0.5)),
        ),
        (
            "minicpm",
            "head-divisor",
            "hidden states are not divided before the head",
            "lm_head",
            edit("config", fields(dim_model_base=to(256))),
        ),
        (
            "cohere2",
            "logit-scale",
            "logits are not scaled",
            "logits",
            edit("config", fields(logit_scale=to(1.0))),
        ),
        (
            "deepseek_v3",
            "no-temperature",
            "layer 1's scores lack yarn's temperature squared",
            "model.layers.1.self_attn.unembed_out",
            edit("blocks.1.attention.scale", to(96**-0.5)),
        ),
        (
            "qwen3_5",
            "queries-of-the-delta-rule",
            "queries of the delta rule are scaled once where twice belongs",
            "language_model.model.layers.0.linear_attn.norm",
            swap("engine.gated_delta:unit_queries_and_keys", queries_scaled_once),
        ),
        (
            "falcon_h1-hub",
            "multipliers-ignored",
            "a hub snapshot's weights are not multiplied",
            "model.embed_tokens",
            swap("engine.families.falcon_h1:multiply_weights", lambda _: lambda *_: None),
        ),
        (
            "kimi_linear",
            "queries-of-delta-attention",
            "queries of delta attention are scaled once where twice belongs",
            "model.layers.0.self_attn.o_norm",
            swap("engine.delta_attention:unit_queries_and_keys", queries_scaled_once),
        ),
    )
)

SOFTCAP: Final = tuple(
    fault("softcap", model, what, says=says, at=at, cases=taps(model), plant=plant)
    for model, what, says, at, plant in (
        (
            "gemma2",
            "scores-uncapped",
            "scores are not capped",
            "model.layers.0.self_attn.o_proj",
            swap(
                "engine.families.gemma2:soft_capped", lambda right: lambda x, cap: x if x.ndim == 5 else right(x, cap)
            ),
        ),
        (
            "gemma2",
            "another-cap-of-scores",
            "layer 3 caps scores at 49 for 50",
            "model.layers.3.self_attn.o_proj",
            edit("blocks.3.attention.config", fields(attn_logit_softcapping=plus(-1.0))),
        ),
        (
            "gemma2",
            "cap-not-multiplied-back",
            "what is capped is not multiplied by the cap",
            "model.layers.0.self_attn.o_proj",
            swap("engine.families.gemma2:soft_capped", lambda _: lambda x, cap: mx.tanh(x / cap)),
        ),
        (
            "gemma2",
            "reciprocal",
            "scores are multiplied by the reciprocal of the cap instead of divided by it",
            "model.layers.0.self_attn.o_proj",
            swap("engine.families.gemma2:soft_capped", lambda _: lambda x, cap: mx.tanh(x * (1 / cap)) * cap),
        ),
        (
            "gemma2",
            "logits-uncapped",
            "logits are not capped",
            "logits",
            swap(
                "engine.families.gemma2:soft_capped", lambda right: lambda x, cap: right(x, cap) if x.ndim == 5 else x
            ),
        ),
        (
            "gemma2",
            "logits-capped-twice",
            "logits are capped twice",
            "logits",
            swap(
                "engine.families.gemma2:soft_capped",
                lambda right: lambda x, cap: right(x, cap) if x.ndim == 5 else right(right(x, cap), cap),
            ),
        ),
        (
            "gemma4_text",
            "another-cap-of-logits",
            "logits are capped at 31 for 30",
            "logits",
            edit("config", fields(final_logit_softcapping=plus(1.0))),
        ),
    )
)


FAULTS: Final[tuple[Fault, ...]] = (*SCALE, *SOFTCAP)
