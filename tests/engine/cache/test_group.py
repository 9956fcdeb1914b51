"""Several caches of one layer: order, offset, kind and arrays of the members, and that it is a value."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache

Normal = Callable[..., mx.array]


def members(normal: Normal) -> tuple[RecurrentCache, PlainCache]:
    new = normal(0, (1, 1, 3, 4))
    return RecurrentCache.empty(2).advanced(normal(1, (1, 4)), None, by=3), PlainCache().append(new, new)[0]


def test_kind_and_arrays_follow_the_members_in_order(normal: Normal) -> None:
    state, plain = members(normal)
    group = CacheGroup(members=(state, plain))
    assert group.kind == "list[arrays-2,plain]"
    assert [id(array) for array in group.arrays] == [id(array) for array in (*state.arrays, *plain.arrays)]
    assert CacheGroup(members=(plain, RotatingCache(max_size=8))).kind == "list[plain,rotating-w8-k0]"


def test_the_offset_is_that_of_the_first_member(normal: Normal) -> None:
    _, plain = members(normal)
    assert CacheGroup(members=(plain, PlainCache())).offset == 3
    assert CacheGroup(members=(PlainCache(), plain)).offset == 0


def test_replacing_members_leaves_the_old_group_as_it_was(normal: Normal) -> None:
    state, plain = members(normal)
    old = CacheGroup(members=(PlainCache(), PlainCache()))
    new = old.replaced(plain, state)
    assert new.members == (plain, state)
    assert (old.offset, old.arrays) == (0, ())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_members_is_a_fault(count: int) -> None:
    with pytest.raises(ValueError, match=rf"^{count} members for 2$"):
        CacheGroup(members=(PlainCache(), PlainCache())).replaced(*[PlainCache()] * count)
