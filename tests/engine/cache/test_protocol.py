"""A layer of attention gets a cache of keys and values, or a fault that names what it got."""

import mlx.core as mx
import pytest

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, as_kv
from engine.cache.quantized import QuantizedCache, pack
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache

HEADS = pack(mx.zeros((1, 1, 2, 32)), bits=8, group_size=32)


@pytest.mark.parametrize(
    "cache",
    [PlainCache(), RotatingCache(max_size=4), QuantizedCache(keys=HEADS, values=HEADS, offset=2)],
    ids=lambda cache: cache.kind,
)
def test_a_cache_of_keys_and_values_is_handed_on_as_it_is(cache: Cache) -> None:
    assert as_kv(cache) is cache


@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        (RecurrentCache.empty(2), r"arrays-2"),
        (CacheGroup(members=(PlainCache(), PlainCache())), r"list\[plain,plain\]"),
    ],
)
def test_another_kind_is_a_fault_that_names_it(cache: Cache, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^a layer of attention was handed a cache of kind {kind}$"):
        as_kv(cache)
