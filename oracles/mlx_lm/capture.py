"""Capture of one case through mlx-lm's own generation loop.

Guarantees: logits are those that `mlx_lm.generate.generate_step` computes, kept by a processor that stands first and stores
copied handles, so that later processors cannot alter a stored row and nothing is evaluated early. Forced ids enter by a
sampler. The loop always runs one step ahead; its last row is dropped.

The three feeds: `tail-split` is the loop as it is; `chunked` is the loop with a smaller prefill step; `whole` is one forward
over the prompt with the loop's order of work after it (row, conversion of the caches, token), then the loop from that token on.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from oracles.mlx_lm.cache_words import cache_words, check_kv_obeyed
from oracles.mlx_lm.taps import Taps
from parity.case import Case
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, activation_name, logits_name

PREFILL_STEP: Final = 2048  # mlx-lm's own default, stated so that another default could not slip in
UNUSED_START: Final = 0  # quantized_kv_start where nothing is quantised


class Recorder:
    """A logits processor that stores the row it is shown and what the taps saw in the forward that made it.

    Args:
        num_rows: Rows wanted; the loop shows one more.
        caches: The loop's list of caches, which it converts in place.
        taps: Watches modules, or None.
    """

    def __init__(self, num_rows: int, caches: list[Any], taps: Taps | None) -> None:
        self.rows: list[mx.array] = []
        self.activations: list[dict[str, mx.array]] = []
        self.final_caches: tuple[Any, ...] | None = None
        self._num_rows = num_rows
        self._caches = caches
        self._taps = taps

    def __call__(self, _tokens: mx.array, logits: mx.array) -> mx.array:
        """Store a row; on the surplus one, keep the caches as the last wanted step left them."""
        seen = {} if self._taps is None else self._taps.take()
        if len(self.rows) < self._num_rows:
            self.rows.append(mx.array(logits))
            self.activations.append(seen)
        elif self.final_caches is None:
            self.final_caches = tuple(self._caches)  # this step's own conversion has not happened yet
        return logits


class Forced:
    """A sampler that ignores what it is shown and gives the next id; past the end it repeats the last."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        self._next = 0

    def __call__(self, _logprobs: mx.array) -> mx.array:
        """The next id, shape [1]."""
        token = self._ids[min(self._next, len(self._ids) - 1)]
        self._next += 1
        return mx.array([token], dtype=mx.uint32)


def capture(case: Case, model: Any) -> Trace:  # noqa: ANN401 - mlx-lm's modules have no types
    """Run a case on a loaded model.

    Args:
        case: The question; greedy or forced.
        model: Loaded by mlx-lm and cast to the case's dtype.

    Returns:
        Rows of shape [1, V], activations where asked for, token ids and the cache words after the last row's step.

    Raises:
        NotImplementedError: The sampler is not greedy.
        KVOptionIgnoredError: mlx-lm ran, and did not quantise what it was asked to.
    """
    if case.sampler != "greedy":
        raise NotImplementedError(f"sampler {case.sampler!r}: this oracle records greedy and forced runs")
    caches = make_prompt_cache(model)
    taps = Taps(model, case.record) if case.record else None
    recorder = Recorder(case.num_steps, caches, taps)
    sampler = None if case.forced_ids is None else Forced(case.forced_ids)
    with taps.watching() if taps else nullcontext():
        ids = _run(case, model, caches, recorder, sampler)
    final = recorder.final_caches if recorder.final_caches is not None else tuple(caches)
    check_kv_obeyed(case, final)
    return _trace(recorder, ids, cache_words(final))


def _run(case: Case, model: Any, caches: list[Any], recorder: Recorder, sampler: Forced | None) -> list[int]:  # noqa: ANN401
    kv = {
        "kv_bits": case.kv.bits,
        "kv_group_size": case.kv.group_size,
        "quantized_kv_start": UNUSED_START if case.kv.bits is None else case.kv.start,
    }
    prompt = mx.array(case.prompt_ids)
    ids: list[int] = []
    num_left = case.num_steps
    if case.feed.mode == "whole":
        with mx.stream(generation_stream):
            logits = recorder(prompt, model(prompt[None], cache=caches)[:, -1, :])
            maybe_quantize_kv_cache(caches, **kv)
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            token = sampler(logprobs) if sampler else mx.argmax(logprobs, axis=-1)
            mx.eval(token, [cache.state for cache in caches])
        ids.append(int(np.array(token)[0]))
        num_left -= 1
        prompt = token
    if num_left:
        steps = generate_step(
            prompt,
            model,
            max_tokens=num_left,
            sampler=sampler,
            logits_processors=[recorder],
            prompt_cache=caches,
            prefill_step_size=case.feed.chunk or PREFILL_STEP,
            **kv,
        )
        ids += [int(token) for token, _ in steps]
    return ids


def _trace(recorder: Recorder, ids: list[int], cache: tuple[str, ...]) -> Trace:
    tensors: dict[str, Tensor] = {}
    for step, (row, seen) in enumerate(zip(recorder.rows, recorder.activations, strict=True)):
        tensors.update({activation_name(step, path): to_tensor(value) for path, value in seen.items()})
        tensors[logits_name(step)] = to_tensor(row)
    tensors[TOKEN_IDS] = Tensor.of(np.array(ids, dtype="<i4"))
    return Trace(tensors=tensors, cache=cache)


def to_tensor(array: mx.array) -> Tensor:
    """An array's bits: bfloat16 has no buffer format, so its words travel as uint16."""
    if array.dtype == mx.bfloat16:
        return Tensor.of(np.array(array.view(mx.uint16)), dtype="BF16")
    return Tensor.of(np.array(array))
