"""Arrays of an arena begin on a line, never overlap, and outlive the arena that gave them."""

from itertools import pairwise

import numpy as np
import pytest

from engine.kernels import arena
from engine.kernels.arena import CHUNK, LINE, PAGE, Arena
from engine.kernels.blocks import address_of


def test_arrays_begin_on_a_line_and_do_not_overlap() -> None:
    some = Arena()
    sizes = [
        1,
        63,
        64,
        65,
        5000,
        CHUNK // 2,
        CHUNK // 2 + 1,
        3,
        CHUNK,
        7,
        CHUNK + 1,
        CHUNK // 3,
        CHUNK // 3,
        CHUNK // 3 + 5,
    ]
    given = [some.array((size,), np.uint8) for size in sizes]
    assert [array.nbytes for array in given] == sizes
    spans = sorted((address_of(array), address_of(array) + array.nbytes) for array in given)
    assert all(start % LINE == 0 for start, _ in spans)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def test_small_arrays_stand_side_by_side_on_large_pages() -> None:
    some = Arena()
    first, second = some.array((100,), np.uint16), some.array((3, 4), np.float32)
    assert address_of(first) % PAGE == 0
    assert address_of(second) - address_of(first) == 256
    assert (second.shape, second.dtype) == ((3, 4), np.float32)


def test_arrays_outlive_their_arena() -> None:
    array = Arena().array((1000,), np.int64)
    array[:] = np.arange(1000)
    assert (Arena().array((1000,), np.int64).shape, array.sum()) == ((1000,), 499500)


def test_a_machine_without_large_pages_has_the_same_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(arena.mmap, "MADV_HUGEPAGE", raising=False)
    assert address_of(Arena().array((10,), np.float32)) % LINE == 0
