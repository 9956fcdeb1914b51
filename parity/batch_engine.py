"""Batch cases on the reference engine: its batched loop in, the sequences' rows one after the other out.

It runs; it does not judge.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, BatchRun, Request, begin, begin_left
from engine.cache.convert import KVMode, started
from engine.generate import Feed, Picker, forced, greedy
from engine.model import CausalModel
from parity.batch import Batch
from parity.case import Case
from parity.errors import CaseError
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name

ToTensor = Callable[[mx.array], Tensor]


def run_batch_case(
    case: Case, batch: Batch, model: CausalModel, *, feed: Feed, kv: KVMode, to_tensor: ToTensor
) -> Trace:
    """Run a batch case.

    Args:
        case: The question.
        batch: Its sequences.
        model: From `open_model`.
        feed: The case's feed as the engine's.
        kv: The case's KV mode as the engine's.
        to_tensor: A row's bits.

    Raises:
        EngineError: The model does not run in batches, or the KV mode does not fit; nothing was run.
        CaseError: The sampler is not one that the engine has.
    """
    if case.sampler != "greedy":
        raise CaseError(
            f"the engine has no sampler {case.sampler!r}", case=case.name, known="greedy", next_step="use greedy"
        )
    prompts = batch.prompts(case.prompt_ids)
    picks: list[Picker] = [greedy for _ in prompts]
    if case.forced_ids is not None:
        picks = [forced(ids) for ids in batch.forced(case.forced_ids)]
    requests = [
        Request(prompt_ids=prompt, num_steps=num_steps, pick=pick)
        for prompt, num_steps, pick in zip(prompts, batch.steps, picks, strict=True)
    ]
    found: dict[tuple[int, int], BatchRow] = {}
    kinds: tuple[str, ...] = ()
    turn = 0
    if batch.fill == "left":
        run, rows = begin_left(model, requests, feed=feed, kv=kv)
    else:
        run, rows = begin(model, kv=kv, piece=feed.piece), ()
    while True:
        kinds = tuple(cache.kind for cache in rows[-1].caches) if rows else kinds
        found |= {(row.number, row.index): row for row in rows}
        if batch.fill != "left":
            run = _joined(run, batch, requests, turn, feed)
        if not run.numbers and turn >= max(batch.joins):
            break
        run, rows = run.turn()
        turn += 1
    return _trace(batch, found, kinds, to_tensor)


def _joined(run: BatchRun, batch: Batch, requests: list[Request], turn: int, feed: Feed) -> BatchRun:
    """The run with the sequences that come in at this turn."""
    for number in [n for n, joins in enumerate(batch.joins) if joins == turn]:
        request = requests[number]
        run = run.insert(request if batch.fill == "right" else _fed_alone(run, request, feed))
    return run


def _fed_alone(run: BatchRun, request: Request, feed: Feed) -> Request:
    """The request with all but its last token already in caches of its own."""
    *first, last = request.prompt_ids
    caches = started(run.model.make_caches(), run.kv)
    for start in range(0, len(first), feed.piece):
        _, caches = run.model.hidden(mx.array([first[start : start + feed.piece]]), caches)
        mx.eval([cache.arrays for cache in caches])
    return Request(prompt_ids=[last], num_steps=request.num_steps, pick=request.pick, caches=caches)


def _trace(batch: Batch, found: dict[tuple[int, int], BatchRow], kinds: tuple[str, ...], to_tensor: ToTensor) -> Trace:
    """Rows under their numbers in the case; sequences are numbered by their place in it, not by when they came."""
    order = sorted(range(len(batch.joins)), key=lambda number: (batch.joins[number], number))
    number_of = {place: number for number, place in enumerate(order)}
    rows = [found[number_of[place], step] for place, step in batch.rows()]
    tensors = {logits_name(k): to_tensor(row.logits_BV) for k, row in enumerate(rows)}
    tensors[TOKEN_IDS] = Tensor.of(np.array([row.token_id for row in rows], dtype="<i4"))
    return Trace(tensors=tensors, cache=kinds)
