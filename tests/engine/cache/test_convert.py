"""When a cache is packed: at its threshold, never while empty, never twice; and which modes a model cannot have."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode, check_kv_mode, converted
from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.quantized import QuantizedCache, pack
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError
from engine.quantization import AFFINE_BITS, AFFINE_GROUPS

Check = Callable[..., None]
Normal = Callable[..., mx.array]


def plain(normal: Normal, length: int) -> PlainCache:
    shape = (1, 2, length, 128)
    return PlainCache().append(normal(0, shape), normal(1, shape))[0]


@pytest.mark.parametrize(
    ("start", "kind"), [(0, "quantized-b8-g64"), (9, "quantized-b8-g64"), (10, "quantized-b8-g64"), (11, "plain")]
)
def test_a_cache_is_converted_once_it_holds_as_many_tokens_as_the_threshold(
    normal: Normal, start: int, kind: str
) -> None:
    (cache,) = converted([plain(normal, 10)], KVMode(bits=8, group_size=64, start=start))
    assert (cache.kind, cache.offset) == (kind, 10)


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group_size", AFFINE_GROUPS)
def test_conversion_packs_the_whole_buffer(normal: Normal, same_bits: Check, bits: int, group_size: int) -> None:
    cache = plain(normal, 10)
    (packed,) = converted([cache], KVMode(bits=bits, group_size=group_size))
    assert isinstance(packed, QuantizedCache)
    for buffer, heads in zip(cache.arrays, (packed.keys, packed.values), strict=True):
        expected = pack(buffer, bits=bits, group_size=group_size)
        same_bits(expected.weight, heads.weight)
        same_bits(expected.scales, heads.scales)
        same_bits(expected.biases, heads.biases)
        assert heads.weight.shape[2] == 256


def test_a_converted_cache_goes_on_after_its_tokens_not_after_its_buffer(normal: Normal, same_bits: Check) -> None:
    (packed,) = converted([plain(normal, 10)], KVMode(bits=8, group_size=64))
    new = normal(5, (1, 2, 1, 128))
    longer, keys, _ = packed.append(new, new)
    assert isinstance(keys, type(pack(new, bits=8, group_size=64)))
    assert (longer.offset, keys.weight.shape[2]) == (11, 11)
    same_bits(pack(new, bits=8, group_size=64).weight, keys.weight[:, :, 10:])


def test_an_empty_cache_is_not_converted() -> None:
    cache = PlainCache()
    assert converted([cache], KVMode(bits=8, start=0)) == (cache,)


def test_a_quantised_cache_is_left_alone_whatever_the_mode(normal: Normal) -> None:
    (packed,) = converted([plain(normal, 10)], KVMode(bits=8, group_size=64))
    (again,) = converted([packed], KVMode(bits=4, group_size=32))
    assert again is packed


def test_without_a_width_every_cache_is_left_alone(normal: Normal) -> None:
    caches = (plain(normal, 10), PlainCache())
    for before, after in zip(caches, converted(caches, KVMode()), strict=True):
        assert after is before


def test_each_cache_is_judged_by_itself(normal: Normal) -> None:
    caches = converted([plain(normal, 3), plain(normal, 10), PlainCache()], KVMode(bits=4, start=5))
    assert [cache.kind for cache in caches] == ["plain", "quantized-b4-g64", "plain"]


@pytest.mark.parametrize(
    "mode", [{"bits": 7}, {"bits": 0}, {"bits": 16}, {"bits": 8, "group_size": 16}, {"bits": 8, "start": -1}]
)
def test_an_unknown_mode_is_refused(mode: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        check_kv_mode(KVMode(**mode), [PlainCache()], head_width=64, no_packed_kv=None)
    assert str(caught.value) == (
        "unknown KV mode\n"
        f"  bits        {mode['bits']}\n"
        f"  group size  {mode.get('group_size', 64)}\n"
        f"  start       {mode.get('start', 0)}\n"
        "  known       bits in (2, 3, 4, 5, 6, 8), group_size in (32, 64, 128), start of 0 or more\n"
        "  next        choose one of these"
    )


@pytest.mark.parametrize(("head_width", "group_size"), [(32, 64), (64, 128), (80, 32), (96, 64)])
def test_a_group_that_does_not_divide_the_head_is_refused(head_width: int, group_size: int) -> None:
    with pytest.raises(RequestError) as caught:
        check_kv_mode(KVMode(bits=8, group_size=group_size), [PlainCache()], head_width=head_width, no_packed_kv=None)
    assert str(caught.value) == (
        "the KV mode does not fit the model's heads\n"
        f"  head width  {head_width}\n"
        f"  group size  {group_size}\n"
        f"  next        choose a group size that divides {head_width}"
    )


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ([RotatingCache(max_size=16)], "its caches are rotating-w16-k0"),
        ([PlainCache(), RotatingCache(max_size=16, keep=4)], "its caches are rotating-w16-k4"),
        (
            [RotatingCache(max_size=8), CacheGroup(members=(PlainCache(),)), RotatingCache(max_size=8)],
            "its caches are list[plain], rotating-w8-k0",
        ),
        ([CacheGroup(members=(PlainCache(), RecurrentCache.empty(2)))], "its caches are list[plain,arrays-2]"),
        ([RecurrentCache.empty(2), RecurrentCache.empty(1)], "its caches are recurrent only"),
        ([], "its caches are recurrent only"),
    ],
)
def test_caches_that_cannot_be_packed_are_refused(caches: list[Cache], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_kv_mode(KVMode(bits=8), caches, head_width=64, no_packed_kv=None)
    assert str(caught.value) == (
        "the model's keys and values cannot be packed\n"
        f"  reason  {reason}\n"
        "  next    use the KV mode fp"
    )  # fmt: skip


def test_a_familys_own_reason_against_packing_is_told_whatever_its_caches() -> None:
    with pytest.raises(RequestError) as caught:
        check_kv_mode(KVMode(bits=8), [PlainCache()], head_width=64, no_packed_kv="its attention has sinks")
    assert str(caught.value) == (
        "the model's keys and values cannot be packed\n  reason  its attention has sinks\n  next    use the KV mode fp"
    )


@pytest.mark.parametrize("others", [[], [RecurrentCache.empty(2)]])
def test_a_mode_that_fits_is_accepted(others: list[Cache]) -> None:
    check_kv_mode(KVMode(bits=4, group_size=32), [*others, PlainCache()], head_width=96, no_packed_kv=None)


@pytest.mark.parametrize("caches", [[PlainCache()], [RotatingCache(max_size=16)], [RecurrentCache.empty(1)]])
def test_keys_as_computed_fit_every_head_and_every_cache(caches: list[Cache]) -> None:
    check_kv_mode(KVMode(), caches, head_width=7, no_packed_kv="its attention has sinks")


def test_only_plain_caches_are_converted(normal: Normal) -> None:
    new = normal(0, (1, 2, 10, 128))
    ring, _, _ = RotatingCache(max_size=16).append(new, new)
    state = RecurrentCache.empty(1).advanced(new, by=10)
    group = CacheGroup(members=(plain(normal, 10),))
    for before, after in zip((ring, state, group), converted([ring, state, group], KVMode(bits=8)), strict=True):
        assert after is before
