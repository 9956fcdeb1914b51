"""The loop: feed a prompt, take a row of logits, pick a token, feed it, and so on.

Guarantees: the order of forwards, conversions and rows is mlx-lm's `generate_step` (spec/generate.md section 1), with the
three ways of feeding a prompt selectable because they are different computations. Rows are yielded evaluated; the model
never sees a token before it was picked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx
import numpy as np

from engine.cache.convert import KVMode, check_kv_mode, converted, started
from engine.cache.protocol import Cache
from engine.clear_winner import clear_winner
from engine.errors import RequestError
from engine.model import CausalModel, FastCaches, check_ids

PIECE: Final = 2048  # tokens of the prompt a forward, where nothing else is asked

Picker = Callable[[mx.array, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """How the prompt is cut.

    Attributes:
        whole: One forward over all of it; otherwise all but the last token in pieces, then the last one alone.
        piece: Tokens a piece, at most.
    """

    whole: bool = False
    piece: int = PIECE

    def cut(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """The pieces of a prompt, in order; the last one gives the first row of logits."""
        if self.whole or len(ids) == 1:
            return [ids]
        last = len(ids) - 1
        return [*(ids[i : min(i + self.piece, last)] for i in range(0, last, self.piece)), ids[last:]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One row and the token that follows it.

    Attributes:
        index: 0 for the row that follows the prompt.
        logits_BV: The row, evaluated, [1, V].
        token_id: What was picked.
        caches: The caches after the row was taken and any conversion done.
    """

    index: int
    logits_BV: mx.array
    token_id: int
    caches: tuple[Cache, ...]


def greedy(logits_BV: mx.array, index: int) -> int:
    """The most probable id; the lowest one on a tie.

    Numerics: ids are compared by logits - logsumexp(logits) in the logits' dtype, as the oracle does: in bfloat16 the
        subtraction rounds and can make ties that the logits do not have.
    """
    del index
    if (winner := clear_winner(logits_BV)) is not None:
        return winner
    logprobs_BV = logits_BV - mx.logsumexp(logits_BV, axis=-1, keepdims=True)
    return int(np.array(mx.argmax(logprobs_BV, axis=-1))[0])


def forced(ids: Sequence[int]) -> Picker:
    """A picker that ignores the logits and returns the given ids in turn (teacher forcing).

    Raises (when it is called):
        RequestError: The ids have run out.
    """

    def pick(_logits_BV: mx.array, index: int) -> int:
        if index >= len(ids):
            raise RequestError("the forced ids have run out", ids=len(ids), step=index, next_step="give one id a step")
        return ids[index]

    return pick


def steps(
    model: CausalModel,
    prompt_ids: Sequence[int],
    *,
    num_steps: int,
    pick: Picker = greedy,
    feed: Feed | None = None,
    kv: KVMode | None = None,
    caches: Sequence[Cache] | None = None,
) -> Iterator[Step]:
    """Run a sequence.

    Args:
        model: From `open_model`.
        prompt_ids: At least one id.
        num_steps: Rows to yield; the last picked token is not fed.
        pick: Chooses the token from a row [1, V] and the step's index.
        feed: How the prompt is cut; tail split in pieces of 2048 by default.
        kv: How keys and values are kept; as computed by default.
        caches: Caches to continue on; fresh ones by default. They are values and stay as they are.

    Yields:
        A `Step` a row.

    Raises:
        RequestError: At once: an empty prompt, an id outside the vocabulary, a KV mode that does not fit. Later: a picked id
            outside the vocabulary.
    """
    feed, kv = feed or Feed(), kv or KVMode()
    _check_request(model, prompt_ids, feed, kv)
    return _steps(model, prompt_ids, num_steps=num_steps, pick=pick, feed=feed, kv=kv, caches=caches)


def _steps(
    model: CausalModel,
    prompt_ids: Sequence[int],
    *,
    num_steps: int,
    pick: Picker,
    feed: Feed,
    kv: KVMode,
    caches: Sequence[Cache] | None,
) -> Iterator[Step]:
    held = tuple(model.make_caches() if caches is None else caches)
    if kv != KVMode():
        held = started(held, kv)
    if isinstance(model, FastCaches):
        held = model.fast_caches(held)
    *first, last = feed.cut(prompt_ids)
    for piece in first:
        _, held = model.hidden(mx.array([piece]), held)
        held = converted(held, kv, prompt_done=False)
        mx.eval([cache.arrays for cache in held])
    fed: Sequence[int] = last
    for index in range(num_steps):
        hidden_BLD, held = model.hidden(mx.array([fed]), held)
        row_BV = last_row(model, hidden_BLD)
        held = converted(held, kv)
        mx.eval(row_BV, [cache.arrays for cache in held])
        token_id = pick(row_BV, index)
        check_ids(model, [token_id], "the picked token is")
        yield Step(index=index, logits_BV=row_BV, token_id=token_id, caches=held)
        fed = [token_id]


def last_row(model: CausalModel, hidden_BLD: mx.array) -> mx.array:
    """Logits [B, V] at the last position.

    Numerics: mlx's CPU kernels compute every row of a product by itself (spec/cpu.md section 5), so projecting the last
        position alone gives the bits of the whole product; GPU kernels are chosen by shape, so there the whole is projected.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        hidden_BLD = hidden_BLD[:, -1:, :]
    return model.logits(hidden_BLD)[:, -1, :]


def _check_request(model: CausalModel, prompt_ids: Sequence[int], feed: Feed, kv: KVMode) -> None:
    if not prompt_ids:
        raise RequestError("the prompt is empty", next_step="give at least one token")
    check_ids(model, prompt_ids, "the prompt has token ids")
    if feed.piece < 1:
        raise RequestError(
            "a piece of the prompt needs at least one token", piece=feed.piece, next_step="use 1 or more"
        )
    check_kv_mode(kv, model.make_caches(), head_width=model.head_width, no_packed_kv=model.no_packed_kv)
    if kv.tiling is not None:
        # Dtype and sinks are known where attention is computed: a forward is laid out up to there, and never evaluated.
        empty = started(model.make_caches(), replace(kv, start=0, order="from-empty"))
        model.hidden(mx.array([[prompt_ids[0]]]), empty)
