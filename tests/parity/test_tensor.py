import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.tensor import FLOATS, ITEMSIZE, Tensor


def bf16(*words: int) -> Tensor:
    return Tensor.of(np.array(words, dtype="<u2"), dtype="BF16")


@given(st.sampled_from(sorted(ITEMSIZE)), st.binary(min_size=0, max_size=64))
def test_bits_come_out_as_they_went_in(dtype: str, data: bytes) -> None:
    size = len(data) // ITEMSIZE[dtype]
    tensor = Tensor(dtype=dtype, shape=(size,), data=data[: size * ITEMSIZE[dtype]])

    assert Tensor.of(tensor.bits(), dtype=dtype) == tensor


def test_nan_payloads_and_the_sign_of_zero_survive() -> None:
    words = np.array([0x7FC00001, 0x7FA00002, 0xFFFFFFFF, 0x80000000, 0], dtype="<u4")

    assert Tensor.of(words.view("<f4")).bits().tolist() == words.tolist()


def test_big_endian_input_keeps_its_values() -> None:
    assert Tensor.of(np.array([1.5, -2], dtype=">f4")) == Tensor.of(np.array([1.5, -2], dtype="<f4"))


def test_a_strided_view_is_stored_in_row_major_order() -> None:
    assert Tensor.of(np.arange(6, dtype="<i4").reshape(2, 3).T).values().tolist() == [[0, 3], [1, 4], [2, 5]]


def test_bfloat16_widens_exactly() -> None:
    assert bf16(0x3F9D, 0x8000, 0x7F80, 0xC2F7).values().tolist() == [1.2265625, -0.0, float("inf"), -123.5]


@pytest.mark.parametrize(("dtype", "size"), sorted(ITEMSIZE.items()))
def test_every_dtype_has_values(dtype: str, size: int) -> None:
    tensor = Tensor(dtype=dtype, shape=(2,), data=bytes(2 * size))

    assert tensor.values().tolist() == [0, 0]


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_a_buffer_of_another_length_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"{dtype}\[3\] needs {3 * ITEMSIZE[dtype]} bytes, got 1"):
        Tensor(dtype=dtype, shape=(3,), data=b"x")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype 'F8' is none of"):
        Tensor(dtype="F8", shape=(), data=b"x")


@given(st.integers(0, 7), st.integers(0, 31))
def test_any_flipped_bit_changes_the_digest(element: int, bit: int) -> None:
    words = np.arange(8, dtype="<u4")
    flipped = words.copy()
    flipped[element] ^= np.uint32(1 << bit)

    assert Tensor.of(words).digest != Tensor.of(flipped).digest


def test_dtype_and_shape_belong_to_the_digest() -> None:
    data = bytes(8)
    tensors = [
        Tensor(dtype="F32", shape=(2,), data=data),
        Tensor(dtype="I32", shape=(2,), data=data),
        Tensor(dtype="F32", shape=(1, 2), data=data),
        Tensor(dtype="F64", shape=(1,), data=data),
    ]

    assert len({tensor.digest for tensor in tensors}) == len(tensors)


def test_the_digest_is_pinned_since_goldens_rest_on_it() -> None:
    assert bf16(0x3F80, 0x8000).digest == "4c7065e57f2bc3f3f949ae6d05190672eebe1e2e0e8629f0ecd76bddac588df3"


def test_floats_are_known_dtypes() -> None:
    assert set(ITEMSIZE) >= FLOATS
