"""The comparator is the one judge: show that it cannot be fooled."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.compare import Match, TensorDiff, ulp_distance, ulp_histogram, written
from parity.tensor import FLOATS, ITEMSIZE, Tensor


def f32(*values: float) -> Tensor:
    return Tensor.of(np.array(values, dtype="<f4"))


def words(dtype: str, *bits: int) -> Tensor:
    return Tensor.of(np.array(bits, dtype=f"<u{ITEMSIZE[dtype]}"), dtype=dtype)


@pytest.mark.parametrize(
    ("expected", "actual", "match", "max_ulp"),
    [
        pytest.param(f32(1, 2), f32(1, 2), Match.IDENTICAL, None, id="same"),
        pytest.param(f32(0.0), f32(-0.0), Match.DIFFERENT, 0, id="sign-of-zero"),
        pytest.param(f32(2), f32(math.nextafter(2, 3)), Match.IDENTICAL, None, id="below-f32"),
        pytest.param(words("F32", 0x40000000), words("F32", 0x40000001), Match.DIFFERENT, 1, id="one-ulp"),
        pytest.param(words("F32", 0x00000001), words("F32", 0x80000001), Match.DIFFERENT, 2, id="across-zero"),
        pytest.param(f32(math.nan), f32(math.nan), Match.IDENTICAL, None, id="same-nan"),
        pytest.param(words("BF16", 0x7FC0), words("BF16", 0x7FC1), Match.DIFFERENT, 1, id="nan-payload"),
        pytest.param(words("BF16", 0x3F80), words("F16", 0x3F80), Match.INCOMPARABLE, None, id="dtype"),
        pytest.param(f32(1, 2), f32(1), Match.INCOMPARABLE, None, id="shape"),
        pytest.param(words("I32", 1), words("I32", 2), Match.DIFFERENT, None, id="integers"),
        pytest.param(words("F32"), words("F32"), Match.IDENTICAL, None, id="empty"),
    ],
)
def test_compare(expected: Tensor, actual: Tensor, match: Match, max_ulp: int | None) -> None:
    diff = TensorDiff.of(expected, actual)

    assert (diff.match, diff.max_ulp) == (match, max_ulp)


@given(st.sampled_from(sorted(ITEMSIZE)), st.data())
def test_any_flipped_bit_is_found_where_it_is(dtype: str, data: st.DataObject) -> None:
    width = 8 * ITEMSIZE[dtype]
    bits = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=12))
    at, bit = data.draw(st.integers(0, len(bits) - 1)), data.draw(st.integers(0, width - 1))
    flipped = [word ^ (1 << bit) if i == at else word for i, word in enumerate(bits)]

    diff = TensorDiff.of(words(dtype, *bits), words(dtype, *flipped))

    assert (diff.match, diff.num_different, diff.num_elements, diff.first) == (Match.DIFFERENT, 1, len(bits), (at,))
    assert (diff.expected_bits, diff.actual_bits) == (bits[at], flipped[at])
    assert sum(diff.ulp_histogram.values()) == (1 if dtype in FLOATS else 0)


@given(st.sampled_from(sorted(ITEMSIZE)), st.binary(min_size=8, max_size=64))
def test_equal_bits_are_identical_whatever_they_mean(dtype: str, data: bytes) -> None:
    size = len(data) // ITEMSIZE[dtype]
    tensor = Tensor(dtype=dtype, shape=(size,), data=data[: size * ITEMSIZE[dtype]])

    assert TensorDiff.of(tensor, Tensor.of(tensor.bits().copy(), dtype=dtype)).match is Match.IDENTICAL


def test_the_first_index_is_row_major() -> None:
    expected = np.zeros((2, 3, 4), dtype="<f4")
    actual = expected.copy()
    actual[1, 0, 2] = actual[1, 2, 3] = 1

    diff = TensorDiff.of(Tensor.of(expected), Tensor.of(actual))

    assert (diff.first, diff.num_different) == ((1, 0, 2), 2)


@given(st.floats(-(2.0**120), 2.0**120, width=32), st.integers(1, 50))
def test_ulps_count_neighbouring_floats(value: float, steps: int) -> None:
    far = np.float32(value)
    with np.errstate(all="ignore"):
        for _ in range(steps):
            far = np.nextafter(far, np.float32(np.inf))
    distance = int(ulp_distance(np.array([value], "<f4").view("<u4"), np.array([far], "<f4").view("<u4"))[0])

    assert distance == steps


def test_the_largest_distance_of_float64_does_not_overflow() -> None:
    ends = np.array([2**63 - 1], dtype="<u8"), np.array([2**64 - 1], dtype="<u8")

    assert int(ulp_distance(*ends)[0]) == 2**64 - 2


def test_the_histogram_counts_by_power_of_two() -> None:
    distances = np.array([0, 1, 1, 2, 3, 4, 7, 8, 2**63], dtype=np.uint64)

    assert ulp_histogram(distances) == {0: 1, 1: 2, 2: 2, 4: 2, 8: 1, 2**63: 1}


def test_a_difference_is_told_with_bits_and_values() -> None:
    diff = TensorDiff.of(words("F32", 0, 0x3F9D0000), words("F32", 0, 0x3F9D0001))

    assert diff.at_first() == "[1]: expected 0x3f9d0000 (1.2265625), actual 0x3f9d0001 (1.2265626), 1 ULP"
    assert diff.counted() == "1 of 2 elements, at most 1 ULP"


def test_the_ulp_beside_the_first_difference_is_its_own() -> None:
    diff = TensorDiff.of(words("F32", 8, 8), words("F32", 9, 108))

    assert diff.at_first().endswith(", 1 ULP")
    assert diff.counted() == "2 of 2 elements, at most 100 ULP"


def test_integers_are_told_without_ulps() -> None:
    diff = TensorDiff.of(words("I32", 7), words("I32", 0xFFFFFFFF))

    assert diff.at_first() == "[0]: expected 7, actual -1"
    assert diff.counted() == "1 of 1 elements"


@pytest.mark.parametrize(
    ("dtype", "bits", "text"),
    [
        ("BF16", 0x3F9D, "0x3f9d (1.2265625)"),
        ("F16", 0x2E66, "0x2e66 (0.099975586)"),
        ("F32", 0x80000000, "0x80000000 (-0.0)"),
        ("F32", 0x7FC00001, "0x7fc00001 (nan)"),
        ("F64", 0x3FF0000000000001, "0x3ff0000000000001 (1.0000000000000002)"),
        ("U8", 200, "200"),
        ("I64", 2**64 - 2, "-2"),
        ("U64", 2**64 - 1, str(2**64 - 1)),
    ],
)
def test_an_element_is_written_so_that_it_can_be_read_back(dtype: str, bits: int, text: str) -> None:
    assert written(dtype, bits) == text


def test_identical_tensors_have_nothing_to_tell() -> None:
    assert TensorDiff.of(f32(1), f32(1)).at_first() == ""
