"""A layer of attention gets a cache of keys and values, or a fault that names what it got."""

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, as_kv, positions
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


def test_what_a_cache_offers_is_answered_for_each_class_and_stays_so() -> None:
    class Rows(PlainCache):
        """Another class of the same kind, with the rows of a batch."""

        rows = 2
        row_offsets = (1, 2)

    for _ in range(2):
        assert positions(PlainCache(offset=7)) == 7
        assert np.array(positions(Rows(offset=7))).tolist() == [1, 2]
        assert as_kv(Rows()).kind == "plain"
        with pytest.raises(TypeError, match="was handed a cache of kind arrays-2"):
            as_kv(RecurrentCache.empty(2))
