"""The quantised cache: what it holds is each piece packed by itself, in every format, past every slab."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from engine.cache.protocol import PackedHeads
from engine.cache.quantized import QuantizedCache, pack
from engine.quantization import AFFINE_BITS, AFFINE_GROUPS

Check = Callable[..., None]
Normal = Callable[..., mx.array]

every_format = pytest.mark.parametrize(
    ("bits", "group_size"), [(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUPS]
)


def parts(heads: PackedHeads) -> Iterator[mx.array]:
    yield from (heads.weight, heads.scales, heads.biases)


def piece(normal: Normal, seed: int, length: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    shape = (1, 2, length, 128)
    return normal(2 * seed, shape, dtype), normal(2 * seed + 1, shape, dtype)


def born(normal: Normal, length: int, bits: int, group_size: int, dtype: mx.Dtype = mx.float32) -> QuantizedCache:
    keys, values = (pack(a, bits=bits, group_size=group_size) for a in piece(normal, 0, length, dtype))
    return QuantizedCache(keys=keys, values=values, offset=length)


@every_format
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_it_holds_every_piece_packed_by_itself(
    normal: Normal, same_bits: Check, bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    lengths = [4, 3, 256, 1]
    cache = born(normal, lengths[0], bits, group_size, dtype)
    for seed, length in enumerate(lengths[1:], 1):
        cache, keys, values = cache.append(*piece(normal, seed, length, dtype))
    assert cache.offset == sum(lengths)
    pieces = [piece(normal, seed, length, dtype) for seed, length in enumerate(lengths)]
    for index, heads in enumerate((keys, values)):
        packed = [mx.quantize(p[index], group_size=group_size, bits=bits) for p in pieces]
        for expected, actual in zip(zip(*packed, strict=True), parts(heads), strict=True):
            same_bits(mx.concatenate(expected, axis=2), actual)
        assert (heads.bits, heads.group_size) == (bits, group_size)
        assert heads.weight.shape == (1, 2, sum(lengths), 128 * bits // 32)
        assert heads.scales.shape == heads.biases.shape == (1, 2, sum(lengths), 128 // group_size)
        assert (heads.weight.dtype, heads.scales.dtype, heads.biases.dtype) == (mx.uint32, dtype, dtype)


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_buffers_of_every_width_grow_as_the_plain_cache_does(normal: Normal, bits: int) -> None:
    cache, capacities = born(normal, 1, bits, 64), []
    for seed, length in enumerate([255, 1, 300, 1], 1):
        cache = cache.append(*piece(normal, seed, length))[0]
        capacities.append({array.shape[2] for array in cache.arrays})
    # Born with one position and no slack, so that slabs are counted from 1.
    assert capacities == [{257}, {257}, {257 + 512}, {257 + 512}]


def test_appending_leaves_the_old_cache_as_it_was(normal: Normal, same_bits: Check) -> None:
    cache = born(normal, 4, 8, 64).append(*piece(normal, 1, 1))[0]
    mx.eval(cache.arrays)
    before = [mx.array(array) for array in cache.arrays]
    mx.eval(before)
    longer = cache.append(*piece(normal, 2, 3))[0]
    mx.eval(longer.arrays)
    assert (cache.offset, longer.offset) == (5, 8)
    for expected, actual in zip(before, cache.arrays, strict=True):
        same_bits(expected, actual)


def test_two_appends_to_one_cache_are_independent_forks(normal: Normal, same_bits: Check, other_bits: Check) -> None:
    cache = born(normal, 4, 4, 32).append(*piece(normal, 1, 1))[0]
    one, one_keys, _ = cache.append(*piece(normal, 2, 2))
    mx.eval(one.arrays)
    two, two_keys, _ = cache.append(*piece(normal, 3, 2))
    mx.eval(two.arrays)
    for seed, keys in ((2, one_keys), (3, two_keys)):
        for expected, actual in zip(
            parts(pack(piece(normal, seed, 2)[0], bits=4, group_size=32)), parts(keys), strict=True
        ):
            same_bits(expected, actual[:, :, -2:])
    other_bits(one_keys.weight, two_keys.weight)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 32), (3, 128)])
def test_its_kind_names_width_and_group(normal: Normal, bits: int, group_size: int) -> None:
    cache = born(normal, 4, bits, group_size)
    assert cache.kind == f"quantized-b{bits}-g{group_size}"
    assert cache.append(*piece(normal, 1, 1))[0].kind == cache.kind


def test_the_worked_example_of_the_packed_format() -> None:
    # spec/kv.md section 3: 32 values from -1 to 1 in 4 bits
    packed = pack(mx.linspace(-1, 1, 32).reshape(1, 1, 1, 32), bits=4, group_size=32)
    assert packed.weight[..., 0].item() == 0xBBCCDDEE
    assert packed.biases.item() == 1.0
    assert packed.scales.view(mx.uint32).item() == mx.array(-0.142857149).view(mx.uint32).item()
