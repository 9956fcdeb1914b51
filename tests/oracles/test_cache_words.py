from typing import Any

import pytest

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.quantized import EmptyQuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.cache.rotating_quantized import RotatingQuantizedCache
from oracles.mlx_lm.cache_words import KVOptionIgnoredError, cache_words, check_kv_obeyed
from parity.case import KV, Case
from tests.oracles.shop import make_case


class KVCache:
    pass


class RotatingKVCache:
    def __init__(self, max_size: int, keep: int) -> None:
        self.max_size = max_size
        self.keep = keep


class ArraysCache:
    def __init__(self, slots: int) -> None:
        self.cache = [None] * slots


class CacheList:
    def __init__(self, *caches: object) -> None:
        self.caches = caches


class PoolingCache:
    """A kind that no word is known for."""


class QuantizedKVCache:
    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size


class RotatingQuantizedKVCache(RotatingKVCache):
    def __init__(self, max_size: int, keep: int, bits: int, group_size: int) -> None:
        super().__init__(max_size, keep)
        self.bits = bits
        self.group_size = group_size


Q8 = QuantizedKVCache(8, 64)
ASKED = make_case(kv=KV.parse("kv8-g64"))


@pytest.mark.parametrize(
    ("cache", "word"),
    [
        (KVCache(), "plain"),
        (Q8, "quantized-b8-g64"),
        (RotatingKVCache(16, 0), "rotating-w16-k0"),
        (RotatingKVCache(512, 4), "rotating-w512-k4"),
        (RotatingQuantizedKVCache(16, 4, 3, 128), "rotating-quantized-w16-k4-b3-g128"),
        (ArraysCache(2), "arrays-2"),
        (CacheList(KVCache(), KVCache()), "list[plain,plain]"),
        (CacheList(ArraysCache(1), RotatingKVCache(8, 0)), "list[arrays-1,rotating-w8-k0]"),
        (PoolingCache(), "poolingcache"),
    ],
)
def test_every_kind_has_its_word(cache: object, word: str) -> None:
    assert cache_words([cache]) == (word,)


def test_words_are_one_a_layer_in_order() -> None:
    assert cache_words([Q8, KVCache(), ArraysCache(3)]) == ("quantized-b8-g64", "plain", "arrays-3")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PlainCache(), KVCache()),
        (RotatingCache(max_size=16), RotatingKVCache(16, 0)),
        (RotatingCache(max_size=16, keep=4), RotatingKVCache(16, 4)),
        (EmptyQuantizedCache(bits=4, group_size=32), QuantizedKVCache(4, 32)),
        (
            RotatingQuantizedCache.empty(max_size=16, keep=4, bits=3, group_size=128),
            RotatingQuantizedKVCache(16, 4, 3, 128),
        ),
        (RecurrentCache.empty(2), ArraysCache(2)),
        (
            CacheGroup(members=(PlainCache(), RecurrentCache.empty(1))),
            CacheList(KVCache(), ArraysCache(1)),
        ),
    ],
)
def test_the_engine_has_the_same_word_for_the_same_kind(ours: Any, theirs: object) -> None:
    assert cache_words([theirs]) == (ours.kind,)


@pytest.mark.parametrize(
    "caches",
    [
        [KVCache()],
        [Q8, KVCache()],
        [CacheList(KVCache()), CacheList(KVCache())],
        [ArraysCache(2), ArraysCache(2)],
        [RotatingKVCache(16, 0), Q8],
        [QuantizedKVCache(4, 64)],
        [QuantizedKVCache(8, 32)],
        [],
    ],
)
def test_an_option_that_was_ignored_or_changed_is_an_error(caches: Any) -> None:
    with pytest.raises(KVOptionIgnoredError, match="a KV option was silently ignored: asked for quantized-b8-g64"):
        check_kv_obeyed(ASKED, caches)


def test_recurrent_state_has_nothing_to_quantise() -> None:
    check_kv_obeyed(ASKED, [ArraysCache(2), Q8])


def test_a_conversion_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(KVOptionIgnoredError, match="fp asks for no conversion yet, found quantized-b8-g64"):
        check_kv_obeyed(make_case(), [Q8])


def test_the_start_counts_prompt_and_followers_but_the_last() -> None:
    # 3 tokens of prompt and 2 steps: 4 tokens are in the caches when the last row's step ends
    check_kv_obeyed(make_case(kv=KV.parse("kv8-g64-s4")), [Q8])
    check_kv_obeyed(make_case(kv=KV.parse("kv8-g64-s5")), [KVCache()])
    with pytest.raises(KVOptionIgnoredError):
        check_kv_obeyed(make_case(kv=KV.parse("kv8-g64-s4")), [KVCache()])


def test_a_ring_may_be_packed_in_its_place() -> None:
    check_kv_obeyed(ASKED, [RotatingQuantizedKVCache(16, 0, 8, 64), Q8, ArraysCache(2)])


def asked(word: str) -> Case:
    return make_case(kv=KV.parse(word))


@pytest.mark.parametrize(
    ("word", "caches"),
    [
        ("max16-k4", [RotatingKVCache(16, 4)] * 2),
        ("max16-k4-kv8-g64", [RotatingQuantizedKVCache(16, 4, 8, 64)] * 2),
        ("max16-k4-kv8-g64-s9", [RotatingKVCache(16, 4)] * 2),  # too few tokens for a conversion
        ("config-8g64_1-4g32_2", [KVCache(), Q8, RotatingQuantizedKVCache(16, 0, 4, 32), ArraysCache(2)]),
        ("config-8g64_1-s9", [KVCache(), KVCache()]),
        ("kv8-g64-from-empty", [Q8]),
        ("kv8-g64-tiled16-lifted", [Q8]),
    ],
)
def test_what_was_asked_for_passes(word: str, caches: Any) -> None:
    check_kv_obeyed(asked(word), caches)


@pytest.mark.parametrize(
    ("word", "caches", "said"),
    [
        ("max16-k4", [KVCache()] * 2, "asked for rotating-w16-k4, caches after the run: plain"),
        ("max16-k4", [RotatingKVCache(16, 0)], "asked for rotating-w16-k4, caches after the run: rotating-w16-k0"),
        (
            "max16-k4",
            [ArraysCache(2), KVCache()],
            "asked for rotating-w16-k4, caches after the run: arrays-2, plain",
        ),
        ("max16-k4", [ArraysCache(2)], "asked for rotating-w16-k4, caches after the run: arrays-2"),
        (
            "max16-k4-kv8-g64",
            [Q8],
            "asked for rotating-quantized-w16-k4-b8-g64, caches after the run: quantized-b8-g64",
        ),
        (
            "max16-k4-kv8-g64",
            [RotatingKVCache(16, 4)],
            "asked for rotating-quantized-w16-k4-b8-g64, caches after the run: rotating-w16-k4",
        ),
        (
            "config-8g64_1",
            [KVCache(), KVCache()],
            "asked for quantized-b8-g64 in cache 1, caches after the run: plain, plain",
        ),
        ("config-8g64_1", [Q8, Q8], "asked for quantized-b8-g64 in cache 1, caches after the run: quantized-b8-g64, "),
        ("config-8g64_1", [KVCache()], "asked for quantized-b8-g64 in cache 1, caches after the run: plain"),
        (
            "config-8g64_0",
            [ArraysCache(2), Q8],
            "asked for quantized-b8-g64 in cache 0, caches after the run: arrays-2",
        ),
        ("config-4g64_0", [Q8], "asked for quantized-b4-g64 in cache 0, caches after the run: quantized-b8-g64"),
    ],
)
def test_what_was_not_obeyed_is_an_error(word: str, caches: Any, said: str) -> None:
    with pytest.raises(KVOptionIgnoredError) as caught:
        check_kv_obeyed(asked(word), caches)
    assert said in str(caught.value)


def test_rings_that_were_packed_too_early_are_an_error() -> None:
    with pytest.raises(KVOptionIgnoredError, match="asks for no conversion yet, found rotating-quantized"):
        check_kv_obeyed(asked("max16-k4-kv8-g64-s9"), [RotatingQuantizedKVCache(16, 4, 8, 64)])
