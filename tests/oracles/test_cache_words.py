from typing import Any

import pytest

from oracles.mlx_lm.cache_words import KVOptionIgnoredError, cache_words, check_kv_obeyed
from parity.case import KV
from tests.oracles.shop import make_case


class KVCache:
    pass


class ArraysCache:
    pass


class CacheList:
    pass


class QuantizedKVCache:
    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size


Q8 = QuantizedKVCache(8, 64)
ASKED = make_case(kv=KV.parse("kv8-g64"))


def test_words() -> None:
    assert cache_words([KVCache(), Q8, CacheList()]) == ("plain", "quantized-b8-g64", "cachelist")


@pytest.mark.parametrize(
    "caches",
    [
        [KVCache()],
        [Q8, KVCache()],
        [CacheList(), CacheList()],
        [ArraysCache(), ArraysCache()],
        [QuantizedKVCache(4, 64)],
        [QuantizedKVCache(8, 32)],
        [],
    ],
)
def test_an_option_that_was_ignored_or_changed_is_an_error(caches: Any) -> None:
    with pytest.raises(KVOptionIgnoredError, match="a KV option was silently ignored: asked for quantized-b8-g64"):
        check_kv_obeyed(ASKED, caches)


def test_recurrent_state_has_nothing_to_quantise() -> None:
    check_kv_obeyed(ASKED, [ArraysCache(), Q8])


def test_a_conversion_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(KVOptionIgnoredError, match="fp asks for no conversion yet, found quantized-b8-g64"):
        check_kv_obeyed(make_case(), [Q8])


def test_the_start_counts_prompt_and_followers_but_the_last() -> None:
    # 3 tokens of prompt and 2 steps: 4 tokens are in the caches when the last row's step ends
    check_kv_obeyed(make_case(kv=KV.parse("kv8-g64-s4")), [Q8])
    check_kv_obeyed(make_case(kv=KV.parse("kv8-g64-s5")), [KVCache()])
    with pytest.raises(KVOptionIgnoredError):
        check_kv_obeyed(make_case(kv=KV.parse("kv8-g64-s4")), [KVCache()])
