"""The reference engine on a sampler case: rows in, ids and the randomness behind them out.

Guarantees: every draw goes through `engine.sampling` as in generation; nothing here chooses a token, and nothing judges one.
What `engine.sampling` says is the same for every draw from equal rows (`ready`) is computed once for them.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.sampling import optiq_chain
from engine.sampling.categorical import uniforms_behind
from engine.sampling.chain import Chain, draw_ready, ready, sample
from engine.sampling.keys import SequentialKeys
from engine.sampling.processors import Processing, process
from engine.sampling.rows import check_rows, log_probabilities
from parity.case import Case
from parity.sampled_trace import sampled_trace
from parity.sampling import Sampling
from parity.tensor import Tensor
from parity.trace import Trace

OF_CHAIN: Final = frozenset(Chain.__dataclass_fields__)


def run_sampler_case(case: Case, sampling: Sampling, rows: Sequence[Tensor]) -> Trace:
    """Draw what a sampler case asks for.

    Args:
        case: The question.
        sampling: Its part on drawing.
        rows: [1, V] each, in the case's dtype.

    Raises:
        EngineError: An option or a row does not fit.
    """
    if sampling.chain == "optiq":
        return _run_optiq(case, sampling, rows)
    options = sampling.named
    chain = Chain(**{name: value for name, value in options.items() if name in OF_CHAIN})
    processing = Processing(**{name: value for name, value in options.items() if name not in OF_CHAIN})
    arrays = [_array(row) for row in rows]
    keys = SequentialKeys.of(sampling.seed)
    histories = [list(case.prompt_ids) for _ in range(sampling.batch)]
    ids, uniforms, xtc_uniforms = [], [], []
    repeats = not chain.xtc_probability and chain.temperature > 0 and not processing.looks_back
    known: dict[int, mx.array] = {}  # what is drawn from, by the first of the rows

    def logprobs_of(first: int) -> mx.array:
        chosen = [arrays[(first + element) % len(arrays)] for element in range(sampling.batch)]
        logits_BV = mx.concatenate(
            [process(row, history, processing) for row, history in zip(chosen, histories, strict=True)]
        )
        check_rows(logits_BV)
        return log_probabilities(logits_BV)

    for step in range(case.num_steps):
        first = step % len(arrays)
        used, _ = keys.take(chain.num_keys)  # a source is a value: the chain takes the same keys
        if not repeats:
            ids_B, keys = sample(logprobs_of(first), chain, keys)
        else:
            if first not in known:
                known[first] = ready(logprobs_of(first), chain)
            ids_B, keys = draw_ready(known[first], keys)
        ids.append(np.array(ids_B))
        if used:
            uniforms.append(np.array(uniforms_behind(ids_B, rows[0].shape[-1], used[-1])))
        if len(used) > 1:
            xtc_uniforms.append(np.array(mx.random.uniform(key=used[0])))
        for history, token in zip(histories, ids[-1].tolist(), strict=True):
            history.append(token)
    return sampled_trace(
        rows,
        np.stack(ids),
        uniforms=np.stack(uniforms) if uniforms else None,
        xtc_uniforms=np.stack(xtc_uniforms) if xtc_uniforms else None,
    )


def _run_optiq(case: Case, sampling: Sampling, rows: Sequence[Tensor]) -> Trace:
    """Draws of mlx-optiq's chain: one row at a time, from logits as they are, without processors."""
    chain = optiq_chain.OptiqChain(**sampling.named)
    arrays = [_array(row) for row in rows]
    keys = SequentialKeys.of(sampling.seed)
    ids, uniforms = [], []
    known: dict[int, mx.array] = {}  # what is drawn from, by row
    for step in range(case.num_steps):
        row = step % len(arrays)
        logits_BV = arrays[row]
        check_rows(logits_BV)
        used, _ = keys.take(0 if sampling.greedy else 1)  # a source is a value: the chain takes the same key
        if sampling.greedy:
            ids_B, keys = optiq_chain.sample(logits_BV, chain, keys)
        else:
            if row not in known:
                known[row] = optiq_chain.ready(logits_BV, chain)
            ids_B, keys = optiq_chain.draw_ready(known[row], keys)
        ids.append(np.array(ids_B))
        if used:
            uniforms.append(np.array(mx.random.uniform(shape=logits_BV.shape, key=used[0]))[0, ids[-1]])
    return sampled_trace(rows, np.stack(ids), uniforms=np.stack(uniforms) if uniforms else None, xtc_uniforms=None)


def _array(row: Tensor) -> Any:  # noqa: ANN401 - an mx.array; bfloat16 travels as words
    words = mx.array(row.bits())
    return words.view({"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}[row.dtype])
