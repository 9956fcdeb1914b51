import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parity.models.bfloat16 import round_to_bfloat16

# Halves of a word, so that exact ties and their neighbours are as likely as anything else.
UPPER = st.integers(0, 0xFFFF).filter(lambda upper: upper & 0x7F80 != 0x7F80)
LOWER = st.sampled_from([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]) | st.integers(0, 0xFFFF)


@given(st.lists(st.tuples(UPPER, LOWER), min_size=1, max_size=64))
def test_rounding_gives_the_bits_of_mlx(words: list[tuple[int, int]]) -> None:
    array = np.array([upper << 16 | lower for upper, lower in words], dtype=np.uint32).view(np.float32)
    expected = np.array(mx.array(array).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(round_to_bfloat16(array), expected)


def test_ties_go_to_the_even_word() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF818000, 0x80000000], dtype=np.uint32)
    assert round_to_bfloat16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x8000]
