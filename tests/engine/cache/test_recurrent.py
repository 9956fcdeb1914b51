"""The recurrent cache: slots, the tokens that it counts, and that it is a value."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.cache.plain import PlainCache
from engine.cache.recurrent import RecurrentCache, as_recurrent

Normal = Callable[..., mx.array]


def test_an_empty_one_has_its_slots_and_no_arrays() -> None:
    cache = RecurrentCache.empty(3)
    assert (cache.state, cache.arrays, cache.offset, cache.kind) == ((None,) * 3, (), 0, "arrays-3")


def test_advancing_replaces_every_slot_and_counts_the_tokens(normal: Normal) -> None:
    one, two, three = (normal(seed, (1, 4, 2)) for seed in range(3))
    cache = RecurrentCache.empty(2).advanced(one, two, by=5)
    assert cache.arrays[0] is one
    assert cache.arrays[1] is two
    assert (cache.offset, cache.kind) == (5, "arrays-2")
    later = cache.advanced(three, None, by=1)
    assert later.offset == 6
    assert later.state[0] is three
    assert later.state[1] is None
    assert len(later.arrays) == 1
    assert later.arrays[0] is three


def test_the_old_state_stays_as_it_was(normal: Normal) -> None:
    one, other = normal(0, (1, 4)), normal(1, (1, 4))
    cache = RecurrentCache.empty(1).advanced(one, by=2)
    cache.advanced(other, by=3)
    assert cache.offset == 2
    assert cache.state[0] is one


@pytest.mark.parametrize(("slots", "given"), [(2, 1), (1, 2), (2, 0)])
def test_another_number_of_arrays_is_a_fault(slots: int, given: int) -> None:
    with pytest.raises(ValueError, match=rf"^{given} arrays for {slots} slots$"):
        RecurrentCache.empty(slots).advanced(*[mx.zeros((1,))] * given, by=1)


def test_only_a_recurrent_cache_is_one() -> None:
    cache = RecurrentCache.empty(2)
    assert as_recurrent(cache) is cache
    with pytest.raises(TypeError, match=r"^a recurrent layer was handed a cache of kind plain$"):
        as_recurrent(PlainCache())
