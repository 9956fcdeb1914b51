"""Sampler cases through mlx-lm's own sampler and processors, and the randomness behind each draw.

Guarantees: ids come from `make_sampler` and `make_logits_processors` of mlx-lm after one `mx.random.seed`, as its generation
loop calls them: processors a sequence, on a copy of its row, with the prompt and what was drawn before as history; then one
call of the sampler for the batch. The uniforms are computed beside them, from the keys that the global stream was about to
use, and do not advance it.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from parity.case import Case
from parity.sampled_trace import sampled_trace
from parity.sampling import Sampling
from parity.tensor import Tensor
from parity.trace import Trace

SAMPLER_NAMES: Final = {  # our names to make_sampler's
    "temperature": "temp",
    "top_p": "top_p",
    "min_p": "min_p",
    "min_tokens_to_keep": "min_tokens_to_keep",
    "top_k": "top_k",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "xtc_special": "xtc_special_tokens",
}
PROCESSOR_NAMES: Final = {  # and to make_logits_processors'
    "logit_bias": "logit_bias",
    "repetition_penalty": "repetition_penalty",
    "repetition_window": "repetition_context_size",
    "presence_penalty": "presence_penalty",
    "presence_window": "presence_context_size",
    "frequency_penalty": "frequency_penalty",
    "frequency_window": "frequency_context_size",
}


def sample(case: Case, sampling: Sampling, rows: Sequence[Tensor]) -> Trace:
    """Draw what a sampler case asks for.

    Args:
        case: The question.
        sampling: Its part on drawing.
        rows: [1, V] each, in the case's dtype.
    """
    options = {name: list(value) if name == "xtc_special" else value for name, value in sampling.named.items()}
    sampler = make_sampler(**{SAMPLER_NAMES[n]: value for n, value in options.items() if n in SAMPLER_NAMES})
    processors = make_logits_processors(
        **{PROCESSOR_NAMES[n]: value for n, value in options.items() if n in PROCESSOR_NAMES}
    )
    arrays = [_array(row) for row in rows]
    histories = [list(case.prompt_ids) for _ in range(sampling.batch)]
    ids, uniforms, xtc_uniforms = [], [], []
    mx.random.seed(sampling.seed)
    for step in range(case.num_steps):
        processed = []
        for element, history in enumerate(histories):
            logits = mx.array(arrays[(step + element) % len(arrays)])
            for processor in processors:
                logits = processor(mx.array(history), logits)
            processed.append(logits)
        logits = mx.concatenate(processed, axis=0)
        keys = _next_keys(0 if sampling.greedy else 1 + sampling.xtc)
        drawn = np.array(sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
        ids.append(drawn)
        if keys:
            uniforms.append(_uniforms_behind(drawn, logits.shape[1], keys[-1]))
        if len(keys) > 1:
            xtc_uniforms.append(np.array(mx.random.uniform(key=keys[0])))
        for history, token in zip(histories, drawn.tolist(), strict=True):
            history.append(token)
    return sampled_trace(
        rows,
        np.stack(ids),
        uniforms=np.stack(uniforms) if uniforms else None,
        xtc_uniforms=np.stack(xtc_uniforms) if xtc_uniforms else None,
    )


def _next_keys(count: int) -> list[Any]:
    """The keys that the global stream gives next, without taking them."""
    stream: Any = mx.random.state
    state, keys = mx.array(stream[0]), []
    for _ in range(count):
        state, key = mx.random.split(state)
        keys.append(key)
    return keys


def _uniforms_behind(ids: Any, vocabulary: int, key: Any) -> Any:  # noqa: ANN401 - arrays of numpy and mlx
    """One a row: what the cumulative sum of a single row is walked to, or what became the Gumbel noise of the id."""
    if len(ids) == 1:
        return np.array(mx.random.uniform(shape=(1,), key=key))
    return np.array(mx.random.uniform(shape=(len(ids), vocabulary), key=key))[np.arange(len(ids)), ids]


def _array(row: Tensor) -> Any:  # noqa: ANN401 - an mx.array; bfloat16 travels as words
    return mx.array(row.bits()).view({"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}[row.dtype])
