"""When a cache is packed: at its threshold, never while empty, never twice; and which modes a model cannot have."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode, check_kv_mode, converted, started
from engine.cache.group import CacheGroup
from engine.cache.per_layer import LayerWidth
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, PackedHeads, Tiling, as_kv
from engine.cache.quantized import QuantizedCache, pack
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.cache.rotating_quantized import RotatingQuantizedCache
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
        (
            [RotatingCache(max_size=8), CacheGroup(members=(PlainCache(),)), RotatingCache(max_size=8)],
            "its caches are list[plain]",
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


@pytest.mark.parametrize("others", [[], [RecurrentCache.empty(2)], [RotatingCache(max_size=16)]])
def test_a_mode_that_fits_is_accepted(others: list[Cache]) -> None:
    check_kv_mode(KVMode(bits=4, group_size=32), [*others, PlainCache()], head_width=96, no_packed_kv=None)


@pytest.mark.parametrize("caches", [[PlainCache()], [RotatingCache(max_size=16)], [RecurrentCache.empty(1)]])
def test_keys_as_computed_fit_every_head_and_every_cache(caches: list[Cache]) -> None:
    check_kv_mode(KVMode(), caches, head_width=7, no_packed_kv="its attention has sinks")


def test_states_and_groups_are_never_converted(normal: Normal) -> None:
    new = normal(0, (1, 2, 10, 128))
    state = RecurrentCache.empty(1).advanced(new, by=10)
    group = CacheGroup(members=(plain(normal, 10),))
    for before, after in zip((state, group), converted([state, group], KVMode(bits=8)), strict=True):
        assert after is before


def test_a_ring_becomes_a_packed_ring_in_its_place(normal: Normal) -> None:
    new = normal(0, (1, 2, 20, 128))
    ring, _, _ = RotatingCache(max_size=16, keep=4).append(new, new)
    ring, _, _ = ring.append(new[:, :, :1], new[:, :, :1])
    (packed, early) = converted([ring, RotatingCache(max_size=16)], KVMode(bits=4, start=21))
    assert isinstance(packed, RotatingQuantizedCache)
    assert (packed.kind, packed.offset, packed.index) == ("rotating-quantized-w16-k4-b4-g64", 21, ring.index)
    assert early.kind == "rotating-w16-k0"


def test_widths_by_layer_convert_the_caches_that_they_name(normal: Normal) -> None:
    layers = (LayerWidth(cache=0, bits=8), LayerWidth(cache=2, bits=3, group_size=32))
    caches = converted([plain(normal, 10), plain(normal, 10), plain(normal, 10)], KVMode(layers=layers))
    assert [cache.kind for cache in caches] == ["quantized-b8-g64", "plain", "quantized-b3-g32"]


def test_after_the_prompt_nothing_is_converted_before_its_last_piece(normal: Normal) -> None:
    cache, mode = plain(normal, 10), KVMode(bits=8, order="after-prompt")
    assert converted([cache], mode, prompt_done=False) == (cache,)
    assert converted([cache], mode)[0].kind == "quantized-b8-g64"
    assert converted([cache], KVMode(bits=8), prompt_done=False)[0].kind == "quantized-b8-g64"


def test_from_empty_every_cache_of_keys_is_packed_at_the_start(normal: Normal, same_bits: Check) -> None:
    caches = [PlainCache(), RotatingCache(max_size=16), RecurrentCache.empty(2), plain(normal, 3)]
    begun = started(caches, KVMode(bits=8, order="from-empty"))
    kinds = [cache.kind for cache in begun]
    assert kinds == ["quantized-b8-g64", "rotating-quantized-w16-k0-b8-g64", "arrays-2", "plain"]
    new = normal(5, (1, 2, 10, 128))
    cache, keys, _ = as_kv(begun[0]).append(new, new)
    assert isinstance(keys, PackedHeads)
    same_bits(pack(new, bits=8, group_size=64).weight, keys.weight)
    assert (cache.offset, [array.shape[2] for array in cache.arrays]) == (10, [256] * 6)
    longer, keys, _ = cache.append(new, new)
    assert (longer.offset, keys.weight.shape[2]) == (20, 20)
    same_bits(pack(new, bits=8, group_size=64).scales, keys.scales[:, :, 10:])


def test_an_empty_packed_cache_is_as_long_as_nothing() -> None:
    (empty,) = started([PlainCache()], KVMode(bits=8, order="from-empty"))
    assert (empty.offset, empty.arrays, empty.trimmable, empty.trim(0)) == (0, (), True, empty)
    assert [as_kv(empty).mask(L) for L in (1, 3)] == [None, "causal"]
    with pytest.raises(RequestError, match="does not hold as many tokens as it is to forget"):
        empty.trim(1)


def test_rings_take_the_place_of_plain_caches_at_the_start(normal: Normal) -> None:
    full = plain(normal, 3)
    begun = started([PlainCache(), full], KVMode(max_size=32))
    assert [cache.kind for cache in begun] == ["rotating-w32-k4", "plain"]
    assert started([PlainCache()], KVMode(bits=8))[0].kind == "plain"


def test_a_tiling_goes_with_what_is_packed(normal: Normal) -> None:
    tiling = Tiling(size=16)
    new = normal(0, (1, 2, 3, 128))
    ring, _, _ = RotatingCache(max_size=16).append(new, new)
    for order in ("after-forward", "from-empty"):
        mode = KVMode(bits=8, tiling=tiling, order=order)  # type: ignore[arg-type]
        begun = converted(started([plain(normal, 3), ring, PlainCache(), RotatingCache(max_size=8)], mode), mode)
        for cache in begun:
            _, keys, values = as_kv(cache).append(new, new)
            packed = order == "from-empty" or cache.kind.startswith(("quantized", "rotating-quantized"))
            tilings = {heads.tiling for heads in (keys, values) if isinstance(heads, PackedHeads)}
            assert tilings == ({tiling} if packed and isinstance(keys, PackedHeads) else set())
    assert converted([plain(normal, 3)], KVMode(bits=8))[0].keys.tiling is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        (
            KVMode(bits=8, layers=(LayerWidth(cache=0, bits=8),)),
            "one width for all caches and widths by layer exclude each other",
        ),
        (
            KVMode(bits=8, order="sometime"),  # type: ignore[arg-type]
            "there is no order 'sometime'; known are after-forward, after-prompt, from-empty",
        ),
        (KVMode(order="from-empty"), "an order or tiles need packed keys and values"),
        (KVMode(tiling=Tiling()), "an order or tiles need packed keys and values"),
        (
            KVMode(bits=8, order="from-empty", start=3),
            "caches that are packed from the first token on have no start",
        ),
        (KVMode(bits=6, tiling=Tiling()), "tiles need widths of (4, 8) bits"),
        (KVMode(bits=8, tiling=Tiling(size=0)), "a tile needs at least one position"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(mode: KVMode, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_kv_mode(mode, [PlainCache()], head_width=64, no_packed_kv=None)
    assert str(caught.value) == (
        f"the parts of the KV mode do not go together\n  reason  {reason}\n  next    leave one of them out"
    )


@pytest.mark.parametrize(
    ("caches", "others"),
    [
        ([PlainCache(), RecurrentCache.empty(2)], "arrays-2"),
        ([RotatingCache(max_size=8), PlainCache()], "rotating-w8-k0"),
        ([CacheGroup(members=(PlainCache(),))], "list[plain]"),
    ],
)
def test_rings_are_refused_where_the_oracle_ignores_them(caches: list[Cache], others: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_kv_mode(KVMode(max_size=16), caches, head_width=64, no_packed_kv=None)
    assert str(caught.value) == (
        "the model's caches cannot be replaced by rings\n"
        f"  reason  some are {others}; the oracle ignores max_kv_size there, without a word\n"
        "  next    use the KV mode fp"
    )


def test_a_ring_that_keeps_everything_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        check_kv_mode(KVMode(max_size=4), [PlainCache()], head_width=64, no_packed_kv=None)
    assert str(caught.value) == (
        "a ring needs more positions than it keeps\n  max size  4\n  keep      4\n  next      enlarge max_size"
    )


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (2, "there is no cache 2: the model makes 2"),
        (0, "cache 0 is arrays-2; the oracle leaves it as it is, without a word"),
    ],
)
def test_a_width_for_a_cache_that_cannot_have_it_is_refused(place: int, reason: str) -> None:
    mode = KVMode(layers=(LayerWidth(cache=1, bits=8), LayerWidth(cache=place, bits=4)))
    with pytest.raises(RequestError) as caught:
        check_kv_mode(mode, [RecurrentCache.empty(2), PlainCache()], head_width=64, no_packed_kv=None)
    assert str(caught.value) == (
        f"the model's keys and values cannot be packed\n  reason  {reason}\n  next    use the KV mode fp"
    )
