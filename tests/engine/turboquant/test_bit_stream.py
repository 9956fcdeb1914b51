"""The stream of codes: packing and unpacking is the identity for every width, and the bits lie where the format says."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.turboquant.bit_stream import pack, packed_length, unpack


@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 3),
    length=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
    wide=st.booleans(),
)
def test_packing_and_unpacking_is_the_identity(bits: int, rows: int, length: int, seed: int, wide: bool) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, length), dtype=np.uint32)
    packed = pack(mx.array(codes), bits, word=mx.uint32 if wide else mx.uint8)
    assert packed.shape == (rows, packed_length(length, bits, word=32 if wide else 8))
    assert np.array_equal(np.array(unpack(packed, bits, length)), codes)


@given(bits=st.integers(1, 8), length=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_the_stream_is_one_little_endian_number(bits: int, length: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, length)
    number = sum(int(code) << bits * place for place, code in enumerate(codes))
    for word, size in ((mx.uint8, 8), (mx.uint32, 32)):
        words = packed_length(length, bits, word=size)
        assert np.array(pack(mx.array(codes), bits, word=word)).tobytes() == number.to_bytes(
            words * size // 8, "little"
        )


@pytest.mark.parametrize(("bits", "count", "size"), [(2, 4, 1), (3, 8, 3), (4, 2, 1), (5, 8, 5)])
def test_the_formats_groups_fill_their_bytes(bits: int, count: int, size: int) -> None:
    assert packed_length(count, bits, word=8) == size


def test_the_low_code_comes_first() -> None:
    assert np.array(pack(mx.array([1, 2]), 4)).tolist() == [0x21]
    assert np.array(pack(mx.array([1, 0, 0, 3]), 2)).tolist() == [0b11000001]
