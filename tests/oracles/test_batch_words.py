"""Words of batch caches are the engine's words for the same kinds."""

from typing import Any

from engine.cache.batch import padded
from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.quantized import EmptyQuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from oracles.mlx_lm.batch_words import batch_words


class BatchKVCache:
    pass


class BatchRotatingKVCache:
    max_size = 16


class BatchQuantizedKVCache:
    bits = 4
    group_size = 32


class ArraysCache:
    cache = (None, None)


class CacheList:
    def __init__(self, *caches: Any) -> None:
        self.caches = caches


class Strange:
    pass


def test_each_kind_of_the_oracle_has_the_engines_word() -> None:
    theirs = [
        BatchKVCache(),
        BatchRotatingKVCache(),
        BatchQuantizedKVCache(),
        ArraysCache(),
        CacheList(BatchKVCache(), ArraysCache()),
    ]
    ours = padded(
        [
            PlainCache(),
            RotatingCache(max_size=16),
            EmptyQuantizedCache(bits=4, group_size=32),
            RecurrentCache.empty(2),
            CacheGroup(members=(PlainCache(), RecurrentCache.empty(2))),
        ],
        [0, 1],
    )
    assert batch_words(theirs) == tuple(cache.kind for cache in ours)


def test_a_kind_that_no_word_is_known_for_is_told_by_its_class() -> None:
    assert batch_words([Strange()]) == ("strange",)
