"""Capture of one case through mlx-lm's own generation loop.

Guarantees: logits are those that `mlx_lm.generate.generate_step` computes, kept by a processor that stands first and stores
copied handles, so that later processors cannot alter a stored row and nothing is evaluated early. Forced ids enter by a
sampler. The loop always runs one step ahead; its last row is dropped.

The three feeds: `tail-split` is the loop as it is; `chunked` is the loop with a smaller prefill step; `whole` is one forward
over the prompt with the loop's order of work after it (row, conversion of the caches, token), then the loop from that token on.

The three orders of conversion: `after-forward` is the loop's own; `after-prompt` runs every piece of the prompt on plain keys
and values, then goes on as `whole` does; `from-empty` offers the empty caches to the loop's own conversion before any forward.
Rings for `max_kv_size` are made by mlx-lm where it obeys that option; where a model makes its own caches it ignores the option,
and the loop is handed the same rings instead, one for every plain cache.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from oracles.mlx_lm.cache_words import cache_words, check_kv_obeyed
from oracles.mlx_lm.taps import Taps
from parity.case import Case
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, activation_name, logits_name

PREFILL_STEP: Final = 2048  # mlx-lm's own default, stated so that another default could not slip in
UNUSED_START: Final = 0  # quantized_kv_start where nothing is quantised
RING_KEEP: Final = 4  # first positions that mlx-lm's max_kv_size keeps


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
        NotImplementedError: The sampler is not greedy, or mlx-lm alone is asked for what mlx-optiq adds.
        KVOptionIgnoredError: mlx-lm ran, and did not quantise what it was asked to.
    """
    if case.sampler != "greedy":
        raise NotImplementedError(f"sampler {case.sampler!r}: this oracle records greedy and forced runs")
    if case.oracle == "mlx-lm" and (case.kv.layers or case.kv.tile is not None):
        raise NotImplementedError(f"{case.kv.name}: mlx-lm has no widths by layer and no tiles; mlx-optiq has")
    caches = make_caches(case, model)
    taps = Taps(model, case.record) if case.record else None
    recorder = Recorder(case.num_steps, caches, taps)
    sampler = None if case.forced_ids is None else Forced(case.forced_ids)
    kv = kv_options(case)
    if case.kv.order == "from-empty":
        maybe_quantize_kv_cache(caches, **kv)
    with taps.watching() if taps else nullcontext():
        ids = _run(case, model, caches=caches, recorder=recorder, sampler=sampler, kv=kv)
    final = recorder.final_caches if recorder.final_caches is not None else tuple(caches)
    check_kv_obeyed(case, final)
    return _trace(recorder, ids, cache_words(final))


def make_caches(case: Case, model: Any) -> list[Any]:  # noqa: ANN401 - mlx-lm's modules have no types
    """Empty caches: the model's own, or the rings that the case asks for.

    Raises:
        NotImplementedError: The rings keep another number of first positions than mlx-lm's option does.
    """
    if case.kv.max_size is None:
        return list(make_prompt_cache(model))
    if case.kv.keep != RING_KEEP:
        raise NotImplementedError(f"{case.kv.name}: mlx-lm's rings keep the first {RING_KEEP} positions")
    caches = list(make_prompt_cache(model, max_kv_size=case.kv.max_size))
    if all(type(cache) is KVCache for cache in caches):
        return [RotatingKVCache(max_size=case.kv.max_size, keep=case.kv.keep) for _ in caches]
    return caches


def kv_options(case: Case) -> dict[str, int | None]:
    """The case's KV mode as options of mlx-lm's loop; of per-layer widths, any width, since who reads those ignores it."""
    width = case.kv.widths[0] if case.kv.packs else (None, case.kv.group_size)
    return {
        "kv_bits": width[0],
        "kv_group_size": width[1],
        "quantized_kv_start": case.kv.start if case.kv.packs else UNUSED_START,
    }


def pieces(case: Case) -> list[mx.array]:
    """The prompt as it is fed by hand: whole, or all but its last token in pieces, then that one."""
    ids = list(case.prompt_ids)
    if case.feed.mode == "whole" or len(ids) == 1:
        return [mx.array(ids)]
    step = case.feed.chunk or PREFILL_STEP
    return [*(mx.array(ids[i : min(i + step, len(ids) - 1)]) for i in range(0, len(ids) - 1, step)), mx.array(ids[-1:])]


def _run(
    case: Case,
    model: Any,  # noqa: ANN401 - mlx-lm's modules have no types
    *,
    caches: list[Any],
    recorder: Recorder,
    sampler: Forced | None,
    kv: dict[str, int | None],
) -> list[int]:
    prompt = mx.array(case.prompt_ids)
    ids: list[int] = []
    num_left = case.num_steps
    if case.feed.mode == "whole" or case.kv.order == "after-prompt":
        with mx.stream(generation_stream):
            *first, last = pieces(case)
            for piece in first:
                model(piece[None], cache=caches)
                mx.eval([cache.state for cache in caches])
            logits = recorder(prompt, model(last[None], cache=caches)[:, -1, :])
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
