"""The table of cache kinds: what a file holds of each, and the cache of what a file holds.

A cache is described by its fields: numbers as they are, arrays by name, its parts (packed heads, columns of a batch, members of
a list) by their own fields. A new kind, or a new part of one, joins with one entry. Where a kind keeps more in memory than it
means (room to grow), `stored` leaves that out and `restored` makes room again.

Guarantees: describing and rebuilding gives a cache that goes on bit for bit as the described one would; a description with a
field too many or too few, or of an unknown kind, is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import mlx.core as mx

from engine.cache.batch_columns import Columns
from engine.cache.batch_plain import BatchPlainCache
from engine.cache.batch_quantized import BatchQuantizedCache
from engine.cache.batch_rotating import BatchRotatingCache
from engine.cache.chunked import ChunkedCache
from engine.cache.group import CacheGroup
from engine.cache.paged import PagedCache
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, PackedHeads, Tiling, grown
from engine.cache.quantized import EmptyQuantizedCache, QuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.cache.rotating_quantized import RotatingQuantizedCache
from engine.cache.turboquant import TurboQuantCache
from engine.cache.turboquant_vlm import TurboQuantVlmCache
from engine.turboquant.affine_keys import CodedKeys
from engine.turboquant.rotated_values import CodedValues
from engine.turboquant.unit_codec import CodedVectors

Description = dict[str, Any]  # what JSON can hold; an array is {"array": its name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a kind is kept.

    Attributes:
        type: Its class, a dataclass of numbers, arrays, caches, parts, and tuples of these.
        stored: The cache to describe in place of one in memory.
        restored: The cache in memory, of one that was described.
    """

    type: type[Any]
    stored: Callable[[Any], Any] = lambda cache: cache
    restored: Callable[[Any], Any] = lambda cache: cache


def describe(cache: Cache, name: str, arrays: dict[str, mx.array]) -> Description:
    """A cache as JSON; its arrays are added to `arrays` under names that begin with `name`.

    Raises:
        TypeError: The table has no such kind.
    """
    described: Description = _described(cache, name, arrays)
    return described


def rebuild(description: Description, arrays: Mapping[str, mx.array]) -> Cache:
    """The cache that a description means.

    Raises:
        ValueError: Its kind is unknown, its fields are not those of the kind, or an array is missing.
    """
    cache: Cache = _value(description, arrays)
    return cache


def _described(value: Any, name: str, arrays: dict[str, mx.array]) -> Any:  # noqa: ANN401 - any field of a cache
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, mx.array):
        arrays[name] = value
        return {"array": name}
    if isinstance(value, tuple):
        return [_described(item, f"{name}.{place}", arrays) for place, item in enumerate(value)]
    for word, kind in KINDS.items():
        if type(value) is kind.type:
            stored = kind.stored(value)
            parts = {f.name: _described(getattr(stored, f.name), f"{name}.{f.name}", arrays) for f in fields(stored)}
            return {"kind": word, **parts}
    raise TypeError(f"no cache file holds caches of kind {getattr(value, 'kind', type(value).__name__)}")


def _value(described: Any, arrays: Mapping[str, mx.array]) -> Any:  # noqa: ANN401 - any field of a cache
    if isinstance(described, list):
        return tuple(_value(item, arrays) for item in described)
    if not isinstance(described, dict):
        return described
    if "array" in described:
        if described["array"] not in arrays:
            raise ValueError(f"array {described['array']} is missing")
        return arrays[described["array"]]
    word = str(described.get("kind"))
    if word not in KINDS:
        raise ValueError(f"cache kind {word!r}; known are {', '.join(KINDS)}")
    kind = KINDS[word]
    values = {name: value for name, value in described.items() if name != "kind"}
    wanted = {f.name for f in fields(kind.type)}
    if set(values) != wanted:
        raise ValueError(f"{word} has the fields {sorted(values)}; known are {sorted(wanted)}")
    return kind.restored(kind.type(**{name: _value(value, arrays) for name, value in values.items()}))


def _live_plain(cache: PlainCache) -> PlainCache:
    if cache.keys is None or cache.values is None or cache.offset == 0:
        return PlainCache()
    return replace(cache, keys=cache.keys[:, :, : cache.offset], values=cache.values[:, :, : cache.offset])


def _roomy_plain(cache: PlainCache) -> PlainCache:
    if cache.keys is None or cache.values is None:
        return cache
    return replace(cache, keys=grown(None, 0, cache.keys), values=grown(None, 0, cache.values))


def _each(heads: PackedHeads, change: Callable[[mx.array], mx.array]) -> PackedHeads:
    return replace(heads, weight=change(heads.weight), scales=change(heads.scales), biases=change(heads.biases))


def _live_quantized(cache: QuantizedCache) -> QuantizedCache:
    keys, values = (_each(heads, lambda a: a[:, :, : cache.offset]) for heads in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)


def _roomy_quantized(cache: QuantizedCache) -> QuantizedCache:
    keys, values = (_each(heads, lambda a: grown(None, 0, a)) for heads in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)


KINDS: Final[Mapping[str, Kind]] = {
    "plain": Kind(type=PlainCache, stored=_live_plain, restored=_roomy_plain),
    "quantized": Kind(type=QuantizedCache, stored=_live_quantized, restored=_roomy_quantized),
    "empty-quantized": Kind(type=EmptyQuantizedCache),
    "rotating": Kind(type=RotatingCache),  # whole: after a wrap the order of the ring is part of its bits
    "rotating-quantized": Kind(type=RotatingQuantizedCache),
    "recurrent": Kind(type=RecurrentCache),
    "list": Kind(type=CacheGroup),
    "chunked": Kind(type=ChunkedCache),
    "paged": Kind(type=PagedCache),  # the pool whole: its free blocks are part of what goes on
    "turboquant": Kind(type=TurboQuantCache),
    "turboquant-vlm": Kind(type=TurboQuantVlmCache),
    "batch-plain": Kind(type=BatchPlainCache),
    "batch-rotating": Kind(type=BatchRotatingCache),
    "batch-quantized": Kind(type=BatchQuantizedCache),
    # parts of these
    "packed-heads": Kind(type=PackedHeads),
    "tiling": Kind(type=Tiling),
    "columns": Kind(type=Columns),
    "turboquant-keys": Kind(type=CodedKeys),
    "turboquant-values": Kind(type=CodedValues),
    "turboquant-vlm-vectors": Kind(type=CodedVectors),
}
