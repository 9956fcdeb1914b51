"""Capture of a batch case: mlx-lm's batch caches, and its own batched loop where that can run the case.

Guarantees: `right` and `merged` cases run in `mlx_lm.generate.BatchGenerator`, whose rows a processor a sequence keeps as they
are shown; `left` cases call the model on mlx-lm's batch caches, which are made with the padding, since no loop of mlx-lm feeds
prompts that are padded at their left. Rows are [1, V], the sequences' one after the other. Forced ids enter by a sampler a
sequence. The surplus rows of the loop, which runs one step ahead, are dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from oracles.mlx_lm.batch_words import batch_words
from oracles.mlx_lm.capture import PREFILL_STEP, Forced, to_tensor
from parity.batch import Batch
from parity.case import Case
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name

PAD: Final = 0  # the id that stands for no token, as in mlx-lm
ALL_AT_ONCE: Final = 64  # sequences that may prefill together

MakeCaches = Callable[[Any], list[Any]]
Padded = Callable[[Any, list[int]], Any]


class Rows:
    """A logits processor that stores the rows it is shown, as many as wanted."""

    def __init__(self, wanted: int) -> None:
        self.kept: list[mx.array] = []
        self._wanted = wanted

    def __call__(self, _tokens: mx.array, logits: mx.array) -> mx.array:
        """Store a row [1, V]."""
        if len(self.kept) < self._wanted:
            self.kept.append(mx.array(logits))
        return logits


def capture_batch(
    case: Case,
    batch: Batch,
    model: Any,  # noqa: ANN401 - mlx-lm's modules have no types
    make_caches: MakeCaches = make_prompt_cache,
    own_padded: Padded = lambda _cache, _padding: None,
) -> Trace:
    """Run a batch case on a loaded model.

    Args:
        case: The question; greedy or forced.
        batch: Its sequences.
        model: Loaded by mlx-lm and cast to the case's dtype.
        make_caches: A model to the empty caches of one sequence.
        own_padded: An empty cache and left padding to an empty batch cache; None for mlx-lm's own kinds.

    Returns:
        Rows of shape [1, V], token ids and the cache words of the last forward.

    Raises:
        NotImplementedError: A sampler that is not greedy, or a KV mode that batch caches do not have.
        RuntimeError: The loop ended with other rows than asked for.
    """
    if case.sampler != "greedy":
        raise NotImplementedError(f"sampler {case.sampler!r}: this oracle records greedy and forced runs")
    if case.kv.bits is not None and make_caches is make_prompt_cache:
        raise NotImplementedError(f"{case.kv.name}: mlx-lm has no quantised batch cache")
    prompts = batch.prompts(case.prompt_ids)
    forced = None if case.forced_ids is None else batch.forced(case.forced_ids)
    run = _Run(case=case, batch=batch, prompts=prompts, forced=forced, model=model, make_caches=make_caches)
    with mx.stream(generation_stream):
        rows, ids, words = _left(run, own_padded) if batch.fill == "left" else _looped(run)
    if [len(kept) for kept in rows] != list(batch.steps) or [len(got) for got in ids] != list(batch.steps):
        raise RuntimeError(f"{[len(kept) for kept in rows]} rows and {[len(got) for got in ids]} ids for {batch.steps}")
    flat = [row for kept in rows for row in kept]
    tensors = {logits_name(k): to_tensor(row) for k, row in enumerate(flat)}
    tensors[TOKEN_IDS] = Tensor.of(np.array([token for got in ids for token in got], dtype="<i4"))
    return Trace(tensors=tensors, cache=words)


Captured = tuple[list[list[mx.array]], list[list[int]], tuple[str, ...]]
Ids = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class _Run:
    case: Case
    batch: Batch
    prompts: Ids
    forced: Ids | None
    model: Any
    make_caches: MakeCaches

    @property
    def piece(self) -> int:
        return self.case.feed.chunk or PREFILL_STEP


def _looped(run: _Run) -> Captured:
    """Through `BatchGenerator`: a sequence is inserted before the turn that its plan names."""
    batch, alone = run.batch, run.batch.fill == "merged"
    recorders = [Rows(steps) for steps in batch.steps]
    samplers = [None] * len(batch.steps) if run.forced is None else [Forced(ids) for ids in run.forced]
    ids: list[list[int]] = [[] for _ in batch.steps]
    loop = BatchGenerator(
        run.model,
        completion_batch_size=ALL_AT_ONCE,
        prefill_batch_size=ALL_AT_ONCE,
        prefill_step_size=run.piece,
    )
    number_of: dict[int, int] = {}
    words: tuple[str, ...] = ()
    for turn in range(max(batch.joins) + sum(batch.lengths) + sum(batch.steps) + 1):
        for number in [n for n, joins in enumerate(batch.joins) if joins == turn]:
            prompt, caches = list(run.prompts[number]), run.make_caches(run.model)
            if alone:
                _feed_alone(run.model, prompt[:-1], caches, run.piece)
            (uid,) = loop.insert(
                [prompt[-1:] if alone else prompt],
                max_tokens=[batch.steps[number]],
                caches=[caches],
                all_tokens=[prompt[:-1] if alone else []],
                samplers=[samplers[number]],
                logits_processors=[[recorders[number]]],
            )
            number_of[uid] = number
        _, responses = loop.next()
        words = batch_words(loop._generation_batch.prompt_cache) or words  # noqa: SLF001 - nothing public shows it
        for response in responses:
            ids[number_of[response.uid]].append(int(response.token))
        if len(number_of) == len(ids) and all(len(g) == s for g, s in zip(ids, batch.steps, strict=True)):
            break
    loop.close()
    return [recorder.kept for recorder in recorders], ids, words


def _feed_alone(model: Any, ids: list[int], caches: list[Any], piece: int) -> None:  # noqa: ANN401
    for start in range(0, len(ids), piece):
        model(mx.array([ids[start : start + piece]]), cache=caches)
        mx.eval([cache.state for cache in caches])


def _left(run: _Run, own_padded: Padded) -> Captured:
    """On batch caches made with the padding: the block as the case's feed cuts it, then a column a step."""
    longest = max(run.batch.lengths)
    padding = [longest - length for length in run.batch.lengths]
    caches = [own_padded(cache, padding) or _padded(cache, padding) for cache in run.make_caches(run.model)]
    block = mx.array([[PAD] * pad + list(prompt) for pad, prompt in zip(padding, run.prompts, strict=True)])
    last = 0
    if run.case.feed.mode != "whole" and longest > 1:
        last = longest - 1
        for start in range(0, last, run.piece):
            run.model(block[:, start : min(start + run.piece, last)], cache=caches)
            mx.eval([cache.state for cache in caches])
    fed = block[:, last:]
    here = list(range(len(run.prompts)))
    kept: list[list[mx.array]] = [[] for _ in here]
    ids: list[list[int]] = [[] for _ in here]
    words: tuple[str, ...] = ()
    while here:
        logits = run.model(fed, cache=caches)[:, -1, :]
        words = batch_words(caches)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        greedy = np.array(mx.argmax(logprobs, axis=-1))
        for row, number in enumerate(here):
            kept[number].append(mx.array(logits[row : row + 1]))
            forced = None if run.forced is None else run.forced[number][len(ids[number])]
            ids[number].append(int(greedy[row]) if forced is None else forced)
        stay = [row for row, number in enumerate(here) if len(ids[number]) < run.batch.steps[number]]
        if stay and len(stay) < len(here):
            for cache in caches:
                cache.filter(stay)
        here = [here[row] for row in stay]
        fed = mx.array([[ids[number][-1]] for number in here])
    return kept, ids, words


def _padded(cache: Any, padding: list[int]) -> Any:  # noqa: ANN401
    """An empty batch cache of the kind that a single one merges into, with left padding.

    Raises:
        NotImplementedError: mlx-lm has none.
    """
    if type(cache) is KVCache:
        return BatchKVCache(padding)
    if type(cache) is RotatingKVCache and not cache.keep:
        return BatchRotatingKVCache(cache.max_size, padding)
    if type(cache) is ArraysCache:
        return ArraysCache(len(cache.cache), left_padding=padding)
    if type(cache) is CacheList:
        return CacheList(*(_padded(member, padding) for member in cache.caches))
    raise NotImplementedError(f"no batch cache is known for a {type(cache).__name__}")
