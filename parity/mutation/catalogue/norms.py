"""Faults of normalisation: eps, and the one that some families add to the weight."""

from typing import Final

import mlx.core as mx

from parity.mutation.changes import plus, times, to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap

QWEN3_5: Final = "language_model.model"

EPS: Final = (
    *(
        fault(
            "eps",
            model,
            path.removeprefix("blocks.").replace(".", "-"),
            says=f"eps of {at} is {'ten times' if factor > 1 else 'a tenth of'} what it should be",
            at=at,
            cases=taps(model),
            plant=edit(f"{path}.eps", times(factor)),
        )
        for model, path, at, factor in (
            ("llama", "blocks.0.input_norm", "model.layers.0.input_layernorm", 10),
            ("llama", "blocks.2.post_norm", "model.layers.2.post_attention_layernorm", 10),
            ("llama", "norm", "model.norm", 10),
            ("qwen3", "blocks.1.attention.q_norm", "model.layers.1.self_attn.q_norm", 10),
            ("qwen3_moe", "blocks.3.attention.k_norm", "model.layers.3.self_attn.k_norm", 10),
            ("gemma2", "blocks.0.mlp_norm", "model.layers.0.post_feedforward_layernorm", 10),
            ("gemma3_text", "blocks.2.attention.k_norm", "model.layers.2.self_attn.k_norm", 10),
            ("gemma3_text", "blocks.1.attention_norm", "model.layers.1.post_attention_layernorm", 10),
            ("olmo2", "blocks.0.attention.q_norm", "model.layers.0.self_attn.q_norm", 10),
            ("olmo2", "blocks.2.attention_norm", "model.layers.2.post_attention_layernorm", 10),
            ("granite", "blocks.1.input_norm", "model.layers.1.input_layernorm", 0.1),
            ("starcoder2", "blocks.0.input_norm", "model.layers.0.input_layernorm", 0.1),
            ("starcoder2", "norm", "model.norm", 0.1),
            ("cohere2", "blocks.2.norm", "model.layers.2.input_layernorm", 0.1),
            ("lfm2", "blocks.1.operator.q_norm", "model.layers.1.self_attn.q_layernorm", 0.1),
            ("falcon_h1", "blocks.3.mlp_norm", "model.layers.3.pre_ff_layernorm", 10),
            ("mamba2", "blocks.0.mixer.norm", "backbone.layers.0.mixer.norm", 10),
            ("qwen3_5", "blocks.1.attention.mixer.norm", f"{QWEN3_5}.layers.1.linear_attn.norm", 10),
            ("deepseek_v3", "blocks.0.attention.queries.norm", "model.layers.0.self_attn.q_a_layernorm", 10),
            ("deepseek_v3", "blocks.2.attention.heads.norm", "model.layers.2.self_attn.kv_a_layernorm", 10),
            ("kimi_linear", "blocks.0.attention.norm", "model.layers.0.self_attn.o_norm", 10),
        )
    ),
    fault(
        "eps",
        "gated_delta",
        "of-unit-vectors",
        says="queries and keys of the delta rule are normalised with ten times the eps",
        at=f"{QWEN3_5}.layers.0.linear_attn.norm",
        cases=taps("qwen3_5"),
        plant=swap("engine.gated_delta:UNIT_EPS", to(1e-5)),
    ),
    fault(
        "eps",
        "gated_delta",
        "not-scaled-to-a-mean",
        says="the eps of a sum of squares is added to their mean",
        at=f"{QWEN3_5}.layers.0.linear_attn.norm",
        cases=taps("qwen3_5"),
        plant=swap("engine.gated_delta:unit_queries_and_keys", lambda _: unit_with_plain_eps),
    ),
)

OFFSET: Final = (
    *(
        fault(
            "norm offset",
            model,
            path.removeprefix("blocks.").replace(".", "-"),
            says=f"{at} multiplies by {'w where 1 + w' if amount < 0 else '1 + w where w'} belongs",
            at=at,
            cases=taps(model),
            plant=edit(f"{path}.weight", plus(amount)),
        )
        for model, path, at, amount in (
            ("gemma", "blocks.0.input_norm", "model.layers.0.input_layernorm", -1.0),
            ("gemma2", "blocks.1.attention_norm", "model.layers.1.post_attention_layernorm", -1.0),
            ("gemma3_text", "blocks.0.attention.q_norm", "model.layers.0.self_attn.q_norm", -1.0),
            ("gemma3_text", "norm", "model.norm", -1.0),
            ("llama", "blocks.1.input_norm", "model.layers.1.input_layernorm", 1.0),
            ("qwen3", "blocks.0.attention.k_norm", "model.layers.0.self_attn.k_norm", 1.0),
            ("qwen3_next", "blocks.0.input_norm", "model.layers.0.input_layernorm", 1.0),
            ("mamba2", "norm", "backbone.norm_f", 1.0),
        )
    ),
    fault(
        "norm offset",
        "qwen3_5-hub",
        "stored-less-one",
        says="norms that the hub stores less one are taken as they are",
        at=f"{QWEN3_5}.layers.0.input_layernorm",
        cases=taps("qwen3_5-hub"),
        plant=edit("blocks.0.input_norm.weight", plus(-1.0)),
    ),
    fault(
        "norm offset",
        "gemma3_text",
        "added-in-bfloat16-twice",
        says="one is added twice, in a model that computes in bfloat16",
        at="model.layers.3.pre_feedforward_layernorm",
        cases=taps("gemma3_text", dtype="bf16"),
        plant=edit("blocks.3.mlp_input_norm.weight", plus(1.0)),
    ),
)


def unit_with_plain_eps(q_BLHE: mx.array, k_BLHE: mx.array) -> tuple[mx.array, mx.array]:
    """As `engine.gated_delta.unit_queries_and_keys`, without scaling eps."""
    scale = q_BLHE.shape[-1] ** -0.5
    return scale**2 * mx.fast.rms_norm(q_BLHE, None, 1e-6), scale * mx.fast.rms_norm(k_BLHE, None, 1e-6)


FAULTS: Final[tuple[Fault, ...]] = (*EPS, *OFFSET)
