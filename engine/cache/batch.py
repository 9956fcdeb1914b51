"""Batches of caches: one cache a layer for several sequences, put together, taken apart and changed row by row.

Everything here takes or gives a model's whole tuple of caches. A batch is a value like any cache: filtering, extending or
extracting leaves the old one as it was. Which kinds can be batched: plain, rotating without kept positions, quantised,
recurrent, and groups of these.

Source: spec/kv.md section 10.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, cast, runtime_checkable

from engine.cache.batch_columns import check_alike
from engine.cache.batch_plain import BatchPlainCache
from engine.cache.batch_quantized import BatchQuantizedCache
from engine.cache.batch_rotating import BatchRotatingCache
from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.quantized import EmptyQuantizedCache, QuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError


@runtime_checkable
class BatchCache(Cache, Protocol):
    """What every cache of a batch offers."""

    @property
    def rows(self) -> int:
        """B."""
        ...

    def prepare(self, lengths: Sequence[int]) -> Self:
        """Announce right padding: of the next columns, row b's first `lengths[b]` alone are tokens."""
        ...

    def finalize(self) -> Self:
        """Roll that padding to the left."""
        ...

    def filter(self, keep: Sequence[int]) -> Self:
        """The chosen rows."""
        ...

    def extend(self, other: Self) -> Self:
        """The rows of both."""
        ...

    def extract(self, row: int) -> Cache:
        """One row as a cache of its own."""
        ...


@runtime_checkable
class StandsFor(Protocol):
    """A cache of fast kernels, in memory of their own, that stands for one in mlx's arrays."""

    def plain(self) -> Cache:
        """The cache that holds the same bits in mlx's arrays."""
        ...


Caches = tuple[Cache, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How one kind of single cache is batched: `merged` puts some side by side, `padded` makes an empty batch like one."""

    merged: Callable[[Sequence[Cache]], Cache]
    padded: Callable[[Cache, Sequence[int]], Cache]


def check_kinds(caches: Sequence[Cache]) -> None:
    """Refuse caches of a single sequence that no batch can hold.

    Raises:
        RequestError: There is one.
    """
    for cache in caches:
        if isinstance(cache, CacheGroup):
            check_kinds(cache.members)
        else:
            _kind(cache)


def merged(rows: Sequence[Sequence[Cache]]) -> Caches:
    """Sequences side by side, right-justified.

    Args:
        rows: The caches of each sequence, of any lengths, as one model makes them.

    Returns:
        A batch cache a layer; row b is `rows[b]`.

    Raises:
        RequestError: A kind cannot be batched, or two sequences' kinds differ.
    """
    if not rows:
        raise RequestError("a batch needs a sequence", next_step="give at least one")
    in_arrays = ([cache.plain() if isinstance(cache, StandsFor) else cache for cache in row] for row in rows)
    return tuple(_merged(layer) for layer in zip(*in_arrays, strict=True))


def padded(caches: Sequence[Cache], padding: Sequence[int]) -> Caches:
    """Empty batch caches, where a model's empty caches say of which kinds, with left padding in the columns to come.

    Raises:
        RequestError: A kind cannot be batched.
    """
    return tuple(_padded(cache, padding) for cache in caches)


def prepared(caches: Sequence[Cache], lengths: Sequence[int]) -> Caches:
    """Announce right padding for one forward: row b's first `lengths[b]` columns alone are tokens."""
    return tuple(_each(cache, lambda member: member.prepare(lengths)) for cache in caches)


def finalized(caches: Sequence[Cache]) -> Caches:
    """After that forward: the padding rolled to the left."""
    return tuple(_each(cache, lambda member: member.finalize()) for cache in caches)


def filtered(caches: Sequence[Cache], keep: Sequence[int]) -> Caches:
    """The chosen rows, in that order.

    Raises:
        RequestError: There is no such row.
    """
    return tuple(_each(cache, lambda member: member.filter(keep)) for cache in caches)


def extended(caches: Sequence[Cache], others: Sequence[Cache]) -> Caches:
    """The rows of both batches; the first's first.

    Raises:
        RequestError: Their kinds differ.
    """
    return tuple(_extended(one, other) for one, other in zip(caches, others, strict=True))


def extracted(caches: Sequence[Cache], row: int) -> Caches:
    """One row's caches, as of a sequence of its own.

    Raises:
        RequestError: There is no such row.
    """
    return tuple(_each(cache, lambda member: member.extract(row)) for cache in caches)


def _merged(layer: Sequence[Cache]) -> Cache:
    first = layer[0]
    if isinstance(first, CacheGroup):
        groups = [cache for cache in layer if isinstance(cache, CacheGroup)]
        if len(groups) != len(layer):
            raise _mixed(layer)
        members = zip(*(group.members for group in groups), strict=True)
        return CacheGroup(members=tuple(_merged(member) for member in members))
    if len({_kind(cache) for cache in layer}) > 1:
        raise _mixed(layer)
    return _kind(first).merged(layer)


def _padded(cache: Cache, padding: Sequence[int]) -> Cache:
    if isinstance(cache, CacheGroup):
        return cache.replaced(*(_padded(member, padding) for member in cache.members))
    return _kind(cache).padded(cache, padding)


def _extended(one: Cache, other: Cache) -> Cache:
    if isinstance(one, CacheGroup) and isinstance(other, CacheGroup):
        return one.replaced(*(_extended(*pair) for pair in zip(one.members, other.members, strict=True)))
    check_alike(one, other)
    return _batch(one).extend(_batch(other))


def _each(cache: Cache, change: Callable[[BatchCache], Cache]) -> Cache:
    if isinstance(cache, CacheGroup):
        return cache.replaced(*(_each(member, change) for member in cache.members))
    return change(_batch(cache))


def _batch(cache: Cache) -> BatchCache:
    if not isinstance(cache, BatchCache):
        raise TypeError(f"a batch was handed a single sequence's cache of kind {cache.kind}")
    return cache


def _mixed(layer: Sequence[Cache]) -> RequestError:
    return RequestError(
        "caches of different kinds cannot share a batch",
        kinds=", ".join(sorted({cache.kind for cache in layer})),
        next_step="batch sequences of one model and one KV mode",
    )


def _kind(cache: Cache) -> _Kind:
    kind = _KINDS.get(type(cache))
    if kind is None or (isinstance(cache, RotatingCache) and cache.keep):
        raise RequestError(
            "the cache cannot be part of a batch",
            kind=cache.kind,
            known="plain, rotating without kept positions, quantized, recurrent, groups of these",
            next_step="run the sequences one by one",
        )
    return kind


def _like(cache: Cache) -> EmptyQuantizedCache:
    if not isinstance(cache, EmptyQuantizedCache):
        raise TypeError(f"an empty batch is made like empty caches, not like one of kind {cache.kind}")
    return cache


_QUANTIZED = _Kind(
    merged=lambda rows: BatchQuantizedCache.merged(cast("Sequence[QuantizedCache | EmptyQuantizedCache]", rows)),
    padded=lambda cache, padding: BatchQuantizedCache.empty(padding, _like(cache)),
)
_KINDS: dict[type[Cache], _Kind] = {
    PlainCache: _Kind(
        merged=lambda rows: BatchPlainCache.merged(cast("Sequence[PlainCache]", rows)),
        padded=lambda _, padding: BatchPlainCache.empty(padding),
    ),
    RotatingCache: _Kind(
        merged=lambda rows: BatchRotatingCache.merged(cast("Sequence[RotatingCache]", rows)),
        padded=lambda cache, padding: BatchRotatingCache.empty(cast("RotatingCache", cache).max_size, padding),
    ),
    QuantizedCache: _QUANTIZED,
    EmptyQuantizedCache: _QUANTIZED,
    RecurrentCache: _Kind(
        merged=lambda rows: RecurrentCache.merged(cast("Sequence[RecurrentCache]", rows)),
        padded=lambda cache, padding: RecurrentCache.padded(len(cast("RecurrentCache", cache).state), padding),
    ),
}
