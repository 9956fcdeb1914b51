from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.mutation.changes import exchanged, fields, one_ulp, plus, rolled, rounded, times, to


@given(st.integers(0, 7), st.floats(0.125, 100, width=32))
def test_one_ulp_moves_one_element_to_its_neighbour(index: int, value: float) -> None:
    array = mx.full((8,), value, dtype=mx.float32)
    changed = np.array(one_ulp(index)(array))

    assert np.flatnonzero(changed != np.float32(value)).tolist() == [index]
    assert changed[index] == np.nextafter(np.float32(value), np.float32(np.inf))


def test_one_ulp_of_bfloat16_and_of_packed_words() -> None:
    assert one_ulp(0)(mx.array([1.0], mx.bfloat16)).item() == 1.0078125
    assert one_ulp()(mx.array([[0xFFFFFF0F]], mx.uint32)).item() == 0xFFFFFF10


def test_numbers() -> None:
    assert (times(2)(3), plus(-1)(3), to(None)(3)) == (6, 2, None)


def test_fields_change_a_copy() -> None:
    @dataclass(frozen=True)
    class Pair:
        one: int
        two: int

    right = Pair(1, 2)
    assert fields(two=plus(1))(right) == Pair(1, 3)
    assert right == Pair(1, 2)


def test_entries_change_places() -> None:
    assert exchanged(0, 2)((1, 2, 3)) == (3, 2, 1)
    assert exchanged(0, 1, axis=1)(mx.array([[1, 2, 3]])).tolist() == [[2, 1, 3]]
    assert rolled(1, axis=1)(mx.array([[1, 2, 3]])).tolist() == [[3, 1, 2]]


def test_rounding_keeps_the_dtype() -> None:
    array = rounded(mx.bfloat16)(mx.array([1.001]))

    assert array.dtype == mx.float32
    assert array.item() == pytest.approx(1.0, abs=1e-9)
