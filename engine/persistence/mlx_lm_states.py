"""The classes of mlx-lm's caches and the kinds here that are their equals: what a state of each holds, in mlx-lm's order.

A state is a tree: arrays, numbers and None in lists of lists. One entry a class; lists of caches hold pairs of a state and its
class.

Guarantees: a state becomes a cache only where its shapes and numbers agree; a kind goes over only where the class would go on
with the same bits (tiles of attention and batches do not).
Source: mlx-lm 0.32.2's cache module (facts).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.cache.chunked import ChunkedCache
from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, PackedHeads
from engine.cache.quantized import EmptyQuantizedCache, QuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError

Tree = Any  # arrays, numbers, words and None in lists of lists
LIST: Final = "CacheList"


class UnknownClassError(ValueError):
    """A class of mlx-lm that has no kind here; its argument is the name."""


class UncountedError(ValueError):
    """Nothing says how many tokens a recurrent state has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """A class of mlx-lm.

    Attributes:
        parts: Of its state.
        offset: Which part counts the tokens; None where none does.
        state: The state of a cache; None for one that is not its equal.
        cache: The cache of a state, and of the number of tokens that it has seen as far as that is known.
    """

    parts: int
    offset: int | None
    state: Callable[[Cache], Tree | None]
    cache: Callable[[Tree, int | None], Cache]


def state_of(cache: Cache) -> tuple[str, Tree]:
    """Class and state of a cache.

    Raises:
        RequestError: mlx-lm has no class for it.
    """
    if isinstance(cache, CacheGroup):
        return LIST, [[state, name] for name, state in map(state_of, cache.members)]
    for name, counterpart in CLASSES.items():
        if (state := counterpart.state(cache)) is not None:
            return name, state
    raise RequestError(
        "mlx-lm has no class for this cache", kind=cache.kind, next_step="use engine.persistence.cache_file"
    )


def tokens_seen(name: str, state: Tree) -> int | None:
    """Tokens that a state has seen, as far as it says so."""
    if name == LIST:
        counts = [tokens_seen(word, member) for member, word in state]
        return next((count for count in counts if count is not None), None)
    offset = CLASSES[name].offset if name in CLASSES else None
    return None if offset is None or len(state) <= offset else int(state[offset])


def cache_of(name: str, state: Tree, seen: int | None) -> Cache:
    """The cache of a state.

    Args:
        name: Its class.
        state: As `state_of` gives it.
        seen: Tokens that its sequence has; for states that do not count.

    Raises:
        UnknownClassError: No kind here is the class's equal.
        UncountedError: `seen` is needed and not known.
        ValueError: Shapes and numbers do not agree.
    """
    if name == LIST:
        return CacheGroup(members=tuple(cache_of(word, member, seen) for member, word in state))
    if name not in CLASSES:
        raise UnknownClassError(name)
    if len(state) != CLASSES[name].parts:
        raise ValueError(f"a state of {len(state)} parts for a {name}")
    return CLASSES[name].cache(state, seen)


def _plain_state(cache: Cache) -> Tree | None:
    return [cache.keys, cache.values, cache.offset] if isinstance(cache, PlainCache) else None


def _plain(state: Tree, _: int | None) -> Cache:
    keys, values, offset = state
    return PlainCache(**_heads(keys, values, at_least=offset), offset=offset)


def _rotating_state(cache: Cache) -> Tree | None:
    if not isinstance(cache, RotatingCache):
        return None
    return [cache.keys, cache.values, cache.offset, cache.keep, cache.max_size, cache.index]


def _rotating(state: Tree, _: int | None) -> Cache:
    keys, values, offset, keep, max_size, index = state
    heads = _heads(keys, values, at_least=index)
    return RotatingCache(**heads, offset=offset, keep=keep, max_size=max_size, index=index)


def _quantized_state(cache: Cache) -> Tree | None:
    if isinstance(cache, EmptyQuantizedCache) and cache.tiling is None:
        return [None, None, 0, cache.group_size, cache.bits]
    if isinstance(cache, QuantizedCache) and cache.keys.tiling is None:
        packed = [[heads.weight, heads.scales, heads.biases] for heads in (cache.keys, cache.values)]
        return [*packed, cache.offset, cache.keys.group_size, cache.keys.bits]
    return None


def _quantized(state: Tree, _: int | None) -> Cache:
    *both, offset, group_size, bits = state
    if both == [None, None] and offset == 0:
        return EmptyQuantizedCache(bits=bits, group_size=group_size)
    keys, values = (_packed(heads, offset, bits=bits, group_size=group_size) for heads in both)
    return QuantizedCache(keys=keys, values=values, offset=offset)


def _chunked_state(cache: Cache) -> Tree | None:
    if not isinstance(cache, ChunkedCache):
        return None
    return [cache.keys, cache.values, cache.offset, cache.chunk_size, cache.start]


def _chunked(state: Tree, _: int | None) -> Cache:
    keys, values, offset, chunk_size, start = state
    return ChunkedCache(
        **_heads(keys, values, at_least=offset - start), offset=offset, chunk_size=chunk_size, start=start
    )


def _arrays_state(cache: Cache) -> Tree | None:
    return [list(cache.state), None, None] if isinstance(cache, RecurrentCache) and cache.rows == 1 else None


def _arrays(state: Tree, seen: int | None) -> Cache:
    slots, left_padding, lengths = state
    if left_padding is not None or lengths is not None:
        raise ValueError("a recurrent state of a padded batch")
    if seen is None:
        raise UncountedError
    return RecurrentCache(state=tuple(slots), offset=seen)


def _heads(keys: Tree, values: Tree, *, at_least: int) -> dict[str, mx.array | None]:
    if (keys is None) != (values is None):
        raise ValueError("keys without values")
    if keys is None:
        if at_least:
            raise ValueError(f"no keys for {at_least} positions")
        return {"keys": None, "values": None}
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] < at_least:
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} for {at_least} positions")
    return {"keys": keys, "values": values}


def _packed(parts: Tree, offset: int, *, bits: int, group_size: int) -> PackedHeads:
    weight, scales, biases = parts
    if weight.shape[-1] * 32 != scales.shape[-1] * group_size * bits or weight.shape[2] < offset:
        raise ValueError(
            f"words {list(weight.shape)} and scales {list(scales.shape)} for {offset} positions "
            f"of {bits} bits in groups of {group_size}"
        )
    return PackedHeads(weight=weight, scales=scales, biases=biases, bits=bits, group_size=group_size)


CLASSES: Final[Mapping[str, Counterpart]] = {
    "KVCache": Counterpart(parts=3, offset=2, state=_plain_state, cache=_plain),
    "RotatingKVCache": Counterpart(parts=6, offset=2, state=_rotating_state, cache=_rotating),
    "QuantizedKVCache": Counterpart(parts=5, offset=2, state=_quantized_state, cache=_quantized),
    "ChunkedKVCache": Counterpart(parts=5, offset=2, state=_chunked_state, cache=_chunked),
    "ArraysCache": Counterpart(parts=3, offset=None, state=_arrays_state, cache=_arrays),
}
