"""The plain cache: what it returns, how its buffer grows, and that it is a value."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.plain import PlainCache
from engine.cache.protocol import SLAB, grown

Check = Callable[..., None]
Normal = Callable[..., mx.array]


def heads(normal: Normal, seed: int, length: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return normal(2 * seed, (1, 2, length, 4), dtype), normal(2 * seed + 1, (1, 2, length, 4), dtype)


def filled(normal: Normal, lengths: Sequence[int], dtype: mx.Dtype = mx.float32) -> PlainCache:
    cache = PlainCache()
    for seed, length in enumerate(lengths):
        cache = cache.append(*heads(normal, seed, length, dtype))[0]
        mx.eval(cache.arrays)
    return cache


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1, 255, 1, 300, 1], [256, 256, 512, 769, 769]),
        ([6, 1, 249, 1, 1], [256, 256, 256, 512, 512]),
        ([256, 1], [256, 512]),
        ([257, 255, 1], [512, 512, 768]),
        ([600], [768]),
    ],
)
def test_a_buffer_grows_by_slabs_after_being_cut_to_what_is_used(
    normal: Normal, lengths: list[int], expected: list[int]
) -> None:
    cache, capacities = PlainCache(), []
    for seed, length in enumerate(lengths):
        cache = cache.append(*heads(normal, seed, length))[0]
        capacities.append([array.shape[2] for array in cache.arrays])
    assert capacities == [[size, size] for size in expected]
    assert cache.offset == sum(lengths)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6), dtype=st.sampled_from([mx.float32, mx.bfloat16]))
@settings(max_examples=25, deadline=None)
def test_a_cache_returns_all_that_was_appended_in_order(
    normal: Normal, same_bits: Check, lengths: list[int], dtype: mx.Dtype
) -> None:
    cache = PlainCache()
    pieces = [heads(normal, seed, length, dtype) for seed, length in enumerate(lengths)]
    for count, piece in enumerate(pieces, 1):
        cache, keys, values = cache.append(*piece)
        same_bits(mx.concatenate([k for k, _ in pieces[:count]], axis=2), keys)
        same_bits(mx.concatenate([v for _, v in pieces[:count]], axis=2), values)
        assert cache.offset == sum(lengths[:count])


@pytest.mark.parametrize("lengths", [[3], [255], [256], [3, 300]])
@pytest.mark.parametrize("new", [1, 2, 300])
def test_appending_leaves_the_old_cache_as_it_was(
    normal: Normal, same_bits: Check, lengths: list[int], new: int
) -> None:
    cache = filled(normal, lengths)
    before = [mx.array(array) for array in cache.arrays]
    mx.eval(before)
    longer, _, _ = cache.append(*heads(normal, 50, new))
    mx.eval(longer.arrays)
    for expected, actual in zip(before, cache.arrays, strict=True):
        same_bits(expected, actual)
    assert cache.offset == sum(lengths)


@pytest.mark.parametrize("first_evaluated", [True, False])
def test_two_appends_to_one_cache_are_independent_forks(
    normal: Normal, same_bits: Check, other_bits: Check, first_evaluated: bool
) -> None:
    cache = filled(normal, [5])
    left, right = heads(normal, 60, 2), heads(normal, 61, 2)
    one, one_keys, _ = cache.append(*left)
    if first_evaluated:
        mx.eval(one.arrays, one_keys)
    two, two_keys, _ = cache.append(*right)
    mx.eval(two.arrays, two_keys, one.arrays, one_keys)
    old, _ = heads(normal, 0, 5)
    same_bits(mx.concatenate([old, left[0]], axis=2), one_keys)
    same_bits(mx.concatenate([old, right[0]], axis=2), two_keys)
    other_bits(one_keys, two_keys)


def test_what_was_returned_stays_as_it_was_when_the_cache_grows_on(normal: Normal, same_bits: Check) -> None:
    cache, keys, _ = PlainCache().append(*heads(normal, 0, 3))
    for seed in range(1, 4):
        cache, _, _ = cache.append(*heads(normal, seed, 1))
        mx.eval(cache.arrays)
    same_bits(heads(normal, 0, 3)[0], keys)


def test_an_empty_cache_holds_nothing() -> None:
    assert (PlainCache().offset, PlainCache().arrays) == (0, ())


def test_its_kind_is_plain(normal: Normal) -> None:
    assert (PlainCache().kind, filled(normal, [3]).kind) == ("plain", "plain")


@pytest.mark.parametrize("shape", [(2, 3, 1, 4), (1, 5, 7, 8)])
def test_a_grown_buffer_is_zero_beyond_what_is_used(normal: Normal, same_bits: Check, shape: tuple[int, ...]) -> None:
    B, K, L, E = shape
    buffer = grown(None, 0, normal(0, shape))
    same_bits(mx.zeros((B, K, SLAB - L, E)), buffer[:, :, L:])
