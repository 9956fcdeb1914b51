"""Forwards of branches: a prompt in pieces, and one token each of many branches in as few forwards as their bits allow.

Branches with equally many tokens go through one batched forward where the family runs in batches and their caches' bits do not
depend on it: plain, packed and recurrent ones and groups of these. A ring is straightened when it joins a batch, which changes
the order of later sums, and tiled attention is another computation under the mask of a batch: branches with either go one by
one. Which way a branch went cannot be told from the result.

Guarantees: branches are values; on an error none has changed. Conversions of the KV mode come where `engine.generate` has them.
"""

from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx

from engine.batch_forward import check_batchable, step_batch
from engine.branch.branch import Branch
from engine.cache.batch import extracted, merged
from engine.cache.convert import KVMode, converted, started
from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.quantized import QuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.errors import RequestError
from engine.generate import Feed, last_row
from engine.model import CausalModel, check_ids


def fresh_caches(model: CausalModel, kv: KVMode) -> tuple[Cache, ...]:
    """Empty caches for a new branch, as the KV mode wants them to begin."""
    return started(model.make_caches(), kv)


def feed(model: CausalModel, branch: Branch, token_ids: Sequence[int], *, how: Feed, kv: KVMode) -> Branch:
    """The branch after more tokens, none of them drawn: a prompt, or text put in its mouth.

    Args:
        model: Of the branch's caches.
        branch: The branch.
        token_ids: At least one.
        how: How they are cut.
        kv: How keys and values are kept.

    Raises:
        RequestError: An id outside the vocabulary.
    """
    check_ids(model, token_ids, "the branch is fed token ids")
    caches = branch.caches
    *first, last = how.cut(token_ids)
    for piece in first:
        _, caches = model.hidden(mx.array([piece]), caches)
        caches = converted(caches, kv, prompt_done=branch.size > 0)
        mx.eval([cache.arrays for cache in caches])
    logits_BV, caches = _one(model, last, caches, kv)
    return branch.fed(token_ids, caches, logits_BV).given(token_ids)


def step_each(
    model: CausalModel, branches: Sequence[Branch], token_ids: Sequence[int], *, kv: KVMode, batched: bool = True
) -> list[Branch]:
    """Each branch after one more token of its own, in their order.

    Args:
        model: Of the branches' caches.
        branches: Any number; the same one may come twice.
        token_ids: One a branch.
        kv: How keys and values are kept.
        batched: Merge branches with equally many tokens; False takes them one by one, with the same bits.

    Raises:
        RequestError: An id outside the vocabulary.
    """
    check_ids(model, token_ids, "branches are stepped by token ids")
    batched = batched and is_batchable(model)
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, branch in enumerate(branches):
        together = batched and branch.size and all(map(_is_same_in_a_batch, branch.caches))
        kinds = tuple(cache.kind for cache in branch.caches)
        groups[(branch.size, *kinds) if together else (place,)].append(place)
    after: dict[int, Branch] = {}
    for places in groups.values():
        fed = _together(model, [branches[place].caches for place in places], [token_ids[place] for place in places], kv)
        for place, (logits_BV, caches) in zip(places, fed, strict=True):
            after[place] = branches[place].fed([token_ids[place]], caches, logits_BV)
    return [after[place] for place in range(len(branches))]


def is_batchable(model: CausalModel) -> bool:
    """Whether the family's graph runs in batches."""
    try:
        check_batchable(model)
    except RequestError:
        return False
    return True


def _is_same_in_a_batch(cache: Cache) -> bool:
    if isinstance(cache, CacheGroup):
        return all(map(_is_same_in_a_batch, cache.members))
    if isinstance(cache, QuantizedCache):
        return cache.keys.tiling is None
    return isinstance(cache, PlainCache | RecurrentCache)


def _one(
    model: CausalModel, token_ids: Sequence[int], caches: Sequence[Cache], kv: KVMode
) -> tuple[mx.array, tuple[Cache, ...]]:
    hidden_BLD, held = model.hidden(mx.array([token_ids]), caches)
    logits_BV = last_row(model, hidden_BLD)
    held = converted(held, kv)
    mx.eval(logits_BV, [cache.arrays for cache in held])
    return logits_BV, held


def _together(
    model: CausalModel, rows: Sequence[Sequence[Cache]], token_ids: Sequence[int], kv: KVMode
) -> list[tuple[mx.array, tuple[Cache, ...]]]:
    """Rows [1, V] and caches after one token each, of sequences that are equally long."""
    if len(rows) == 1:
        return [_one(model, token_ids, rows[0], kv)]
    logits_BV, batch = step_batch(model, token_ids, merged(rows))
    split = [converted(extracted(batch, row), kv) for row in range(len(rows))]
    mx.eval([cache.arrays for caches in split for cache in caches])
    return [(logits_BV[row : row + 1], caches) for row, caches in enumerate(split)]
