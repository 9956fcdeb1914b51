"""Slabs are shared by forks and never written where somebody looks; a fused cache stands for the cache of the same bits."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.plain import PlainCache
from engine.cache.protocol import as_kv
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError
from engine.kernels.fields import SLAB
from engine.kernels.history import FusedCache, Geometry, History, Ring, aligned

Same = Callable[[Any, Any], None]
GEOMETRY = Geometry(layers=2, groups=2, width=6, columns=4, dtype=mx.float32)


def write(history: History, before: History, mark: float) -> None:
    """Write a mark and the position to the new positions of every layer, as a step does."""
    for position in range(before.offset, history.offset):
        memory, place = history.slabs[position // SLAB].memory, position % SLAB
        geometry = history.geometry
        keys = memory[: geometry.key_floats].reshape(2, 2, -1, 6, 4)
        values = memory[geometry.key_floats :].reshape(2, 2, 2, SLAB, 4)
        for layer in range(2):
            keys[layer, :, place // 4, :, place % 4] = mark + position + 1000 * layer
            values[layer, :, :, place] = -(mark + position + 1000 * layer)


def grown(history: History, by: int, mark: float) -> History:
    longer = history.extended(by)
    write(longer, history, mark)
    return longer


def marks(history: History, layer: int = 0) -> list[float]:
    keys, values = history.heads(layer)
    assert keys.shape == values.shape == (2, history.offset, 6)
    assert (keys == -values).all()
    assert (keys == keys[0, :, :1]).all()
    return [float(k) - i - 1000 * layer for i, k in enumerate(keys[0, :, 0])]


def test_an_appended_slab_is_the_same_memory() -> None:
    one = grown(History(geometry=GEOMETRY), 5, 0.5)
    two = grown(one, 1, 0.25)
    assert two.slabs[0] is one.slabs[0]
    assert marks(one) == [0.5] * 5
    assert marks(two) == marks(two, 1) == [0.5] * 5 + [0.25]


def test_a_second_branch_gets_a_copy_and_full_slabs_stay_shared() -> None:
    root = grown(History(geometry=GEOMETRY), SLAB + 7, 0.5)
    a, b = grown(root, 3, 0.25), grown(root, 3, 0.125)
    assert a.slabs[1] is root.slabs[1]
    assert b.slabs[1] is not root.slabs[1]
    assert b.slabs[0] is root.slabs[0]
    tail = slice(SLAB + 7, None)
    assert marks(a)[tail] == [0.25] * 3
    assert marks(b)[tail] == [0.125] * 3
    assert marks(root) == [0.5] * (SLAB + 7)


def test_what_is_cut_off_and_written_again_does_not_touch_who_still_sees_it() -> None:
    whole = grown(History(geometry=GEOMETRY), SLAB + 4, 0.5)
    again = grown(whole.shortened(6), 2, 0.25)
    assert len(again.slabs) == 1
    assert marks(again)[-3:] == [0.5, 0.25, 0.25]
    assert marks(whole) == [0.5] * (SLAB + 4)


def test_the_same_place_is_known_by_its_memory() -> None:
    root = grown(History(geometry=GEOMETRY), 9, 0.5)
    assert root.shortened(2).is_same(root.shortened(2))
    assert not root.is_same(root.shortened(1))
    assert not grown(root, 1, 0.0).is_same(grown(root, 1, 0.0))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300), st.integers(0, 3)), min_size=1, max_size=9))
def test_any_tree_of_branches_keeps_every_branch(moves: list[tuple[int, int, int]]) -> None:
    branches: list[tuple[History, list[float]]] = [(History(geometry=GEOMETRY), [])]
    for number, (parent, by, cut) in enumerate(moves):
        history, expected = branches[parent % len(branches)]
        kept = max(0, history.offset - cut)
        mark = (number + 1) / 16
        longer = grown(history.shortened(history.offset - kept), by, mark)
        branches.append((longer, expected[:kept] + [mark] * by))
    for history, expected in branches:
        if history.offset:
            assert marks(history) == expected


def test_memory_begins_on_a_line_of_the_cache() -> None:
    for count in (1, 7, 5000):
        assert aligned(count).__array_interface__["data"][0] % 64 == 0
        assert aligned(count).shape == (count,)


@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_a_ring_holds_what_a_rotating_cache_holds(max_size: int, pieces: list[int]) -> None:
    cache, ring, seen = RotatingCache(max_size=max_size), Ring(max_size=max_size), 0
    for L in pieces:
        new = mx.arange(seen, seen + L).astype(mx.float32).reshape(1, 1, L, 1)
        cache, keys, _ = cache.append(new, new)
        ring, seen = ring.advanced(L), seen + L
        order = [*range(seen - ring.index, seen), *range(seen - ring.held, seen - ring.index)]
        assert np.array(keys).reshape(-1).tolist() == order
        assert ring.held == len(order)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_plain_cache_goes_on_as_if_it_had_always_been(dtype: mx.Dtype, normal: Any, same_bits: Same) -> None:
    geometry = Geometry(layers=1, groups=2, width=6, columns=4, dtype=dtype)
    for window, pieces in (
        (None, (3, 1, 9)),
        (5, (3, 1, 1, 1)),
        (5, (3, 1, 1, 1, 1)),
        (5, (9,)),
        (5, (5,)),
        (5, (2, 7)),
    ):
        expected: Any = PlainCache() if window is None else RotatingCache(max_size=window)
        history = History(geometry=geometry)
        ring = None if window is None else Ring(max_size=window)
        for seed, L in enumerate(pieces):
            keys, values = normal(seed, (1, 2, L, 6), dtype), normal(100 + seed, (1, 2, L, 6), dtype)
            expected, _, _ = expected.append(keys, values)
            before, history = history, history.extended(L)
            ring = None if ring is None else ring.advanced(L)
            for i, position in enumerate(range(before.offset, history.offset)):
                memory, key = history.slabs[0].memory, np.array(keys.astype(mx.float32))[0, :, i]
                memory[: geometry.key_floats].reshape(2, -1, 6, 4)[:, position // 4, :, position % 4] = key
                value = np.zeros((2, 8), np.float32)
                value[:, :6] = np.array(values.astype(mx.float32))[0, :, i]
                memory[geometry.key_floats :].reshape(2, 2, SLAB, 4)[:, :, position] = value.reshape(2, 2, 4)
        cache = FusedCache(history=history, layer=0, ring=ring)
        assert (cache.kind, cache.offset, cache.trimmable) == (expected.kind, expected.offset, expected.trimmable)
        for L in (1, 1, 3, 1):
            keys, values = normal(L, (1, 2, L, 6), dtype), normal(9 * L, (1, 2, L, 6), dtype)
            mask = as_kv(cache).mask(L, window=window)
            assert repr(mask) == repr(expected.mask(L, window=window))
            expected, *right = expected.append(keys, values)
            cache, *found = cache.append(keys, values)  # type: ignore[assignment]
            for a, b in zip(right, found, strict=True):
                same_bits(a, b)


def test_trimming_is_that_of_the_cache_that_it_stands_for() -> None:
    history = grown(History(geometry=GEOMETRY), 5, 0.5)
    assert FusedCache(history=history, layer=1).trim(2).offset == 3
    short = FusedCache(history=history, layer=1, ring=Ring(max_size=8).advanced(5)).trim(2)
    assert (short.offset, short.ring) == (3, Ring(max_size=8, held=3, index=3))
    with pytest.raises(RequestError, match="the cache does not hold as many tokens as it is to forget"):
        FusedCache(history=history, layer=1).trim(6)
    with pytest.raises(RequestError, match="the cache cannot forget its last tokens"):
        FusedCache(history=history, layer=1, ring=Ring(max_size=4).advanced(5)).trim(1)
