"""The packed ring: whatever is appended, it gives what the plain ring gives, packed position by position."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.protocol import KVCache, PackedHeads, Tiling
from engine.cache.quantized import pack
from engine.cache.rotating import RotatingCache
from engine.cache.rotating_quantized import RotatingQuantizedCache
from engine.errors import RequestError
from engine.quantization import AFFINE_BITS

Check = Callable[..., None]
Normal = Callable[..., mx.array]

E = 64


def piece(seed: int, length: int) -> tuple[mx.array, mx.array]:
    drawn = np.random.default_rng(seed).standard_normal((2, 1, 2, length, E), dtype=np.float32)
    return mx.array(drawn[0]), mx.array(drawn[1])


def words(heads: PackedHeads) -> tuple[bytes, ...]:
    parts = (heads.weight, heads.scales.view(mx.uint32), heads.biases.view(mx.uint32))
    return tuple(np.array(mx.contiguous(part)).tobytes() for part in parts)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=14),
    max_size=st.integers(5, 12),
    keep=st.integers(0, 4),
    converted_after=st.integers(0, 14),
    bits=st.sampled_from(AFFINE_BITS),
)
def test_it_gives_what_the_plain_ring_gives_packed(
    lengths: list[int], max_size: int, keep: int, converted_after: int, bits: int
) -> None:
    plain = RotatingCache(max_size=max_size, keep=keep)
    packed = RotatingQuantizedCache.empty(max_size=max_size, keep=keep, bits=bits, group_size=32)
    for seed, length in enumerate(lengths):
        if seed == converted_after:  # wherever the plain ring stands, turned or not
            packed = RotatingQuantizedCache.of(plain, bits=bits, group_size=32)
        window = max_size if seed % 2 else None
        masks = [cache.mask(length, window=window) for cache in (plain, packed)]
        plain, keys, values = plain.append(*piece(seed, length))
        packed, packed_keys, packed_values = packed.append(*piece(seed, length))
        for heads, expected in ((packed_keys, keys), (packed_values, values)):
            assert words(heads) == words(pack(expected, bits=bits, group_size=32))
        assert (packed.offset, packed.index) == (plain.offset, plain.index)
        assert (packed.max_size, packed.keep) == (max_size, keep)
        if isinstance(masks[0], mx.array):
            assert isinstance(masks[1], mx.array)
            assert np.array_equal(np.array(masks[0]), np.array(masks[1]))
        else:
            assert masks[0] == masks[1]


def test_its_kind_names_the_ring_and_the_width() -> None:
    empty = RotatingQuantizedCache.empty(max_size=16, keep=4, bits=3, group_size=128)
    assert empty.kind == "rotating-quantized-w16-k4-b3-g128"
    assert (empty.arrays, empty.keys, empty.values, empty.offset) == ((), None, None, 0)
    assert isinstance(empty, KVCache)


def test_a_tiling_goes_with_what_it_gives() -> None:
    tiling = Tiling(size=7)
    cache = RotatingQuantizedCache.empty(max_size=8, bits=8, group_size=64, tiling=tiling)
    longer, keys, values = cache.append(*piece(0, 3))
    assert (keys.tiling, values.tiling, longer.tiling) == (tiling, tiling, tiling)
    turned = RotatingQuantizedCache.of(RotatingCache(max_size=8), bits=8, group_size=64, tiling=tiling)
    assert turned.append(*piece(0, 3))[1].tiling == tiling


def test_a_turned_ring_is_packed_as_it_lies() -> None:
    ring, _, _ = RotatingCache(max_size=6).append(*piece(0, 6))
    ring, keys, _ = ring.append(*piece(1, 1))
    packed = RotatingQuantizedCache.of(ring, bits=8, group_size=64)
    assert (packed.index, packed.offset) == (1, 7)
    assert packed.keys is not None
    assert words(packed.keys) == words(pack(keys, bits=8, group_size=64))


def test_appending_leaves_the_old_cache_as_it_was() -> None:
    cache, _, _ = RotatingQuantizedCache.empty(max_size=4, bits=8, group_size=64).append(*piece(0, 6))
    assert cache.keys is not None
    before = words(cache.keys)
    forks = [cache.append(*piece(seed, 1)) for seed in (1, 2)]
    mx.eval([fork[0].arrays for fork in forks])
    assert words(cache.keys) == before
    assert words(forks[0][1]) != words(forks[1][1])
    again = cache.append(*piece(1, 1))[1]
    assert words(again) == words(forks[0][1])


def test_it_forgets_its_last_tokens_while_it_has_not_come_round() -> None:
    empty = RotatingQuantizedCache.empty(max_size=8, bits=4, group_size=32)
    first, _, _ = empty.append(*piece(0, 3))
    longer, expected, _ = first.append(*piece(1, 1))
    assert longer.trimmable
    back = longer.trim(1)
    assert (back.offset, back.index) == (first.offset, first.index)
    assert words(back.append(*piece(1, 1))[1]) == words(expected)


def test_a_ring_that_has_come_round_forgets_nothing() -> None:
    cache, _, _ = RotatingQuantizedCache.empty(max_size=4, bits=4, group_size=32).append(*piece(0, 4))
    assert not cache.trimmable
    with pytest.raises(RequestError, match="the cache cannot forget its last tokens"):
        cache.trim(1)
