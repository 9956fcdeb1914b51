import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.models.gguf_repack import GROUP_SIZE, Packed, repack, unpermute_rows

BLOCK_HEADS = {"Q4_1": 4, "Q8_0": 2}
BLOCK_CODES = {"Q4_1": 16, "Q8_0": 32}


def dequantised_bits(packed: Packed) -> npt.NDArray[np.uint32]:
    parts = (mx.array(packed.weight), mx.array(packed.scales), mx.array(packed.biases))
    return np.array(mx.dequantize(*parts, group_size=GROUP_SIZE, bits=packed.bits)).view(np.uint32)


def bits_of_gguf(blocks: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.uint32]:
    return dequantize(blocks, GGMLQuantizationType[kind]).astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_mlx_dequantises_the_repack_to_the_bits_of_gguf(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((24, 96)).astype(np.float32)
    rows[3, :32] = 0  # a block whose step is zero
    blocks = quantize(rows, GGMLQuantizationType[kind])
    assert np.array_equal(dequantised_bits(repack(blocks, kind)), bits_of_gguf(blocks, kind))


@settings(max_examples=50, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["Q4_1", "Q8_0"]))
def test_every_block_is_repacked_exactly_or_refused(data: st.DataObject, kind: str) -> None:
    size = BLOCK_HEADS[kind] + BLOCK_CODES[kind]
    blocks = np.frombuffer(data.draw(st.binary(min_size=2 * size, max_size=2 * size)), dtype=np.uint8).reshape(1, -1)
    try:
        packed = repack(blocks, kind)
    except ValueError:
        halves = blocks.reshape(2, size)[:, : BLOCK_HEADS[kind]].copy().view("<f2").astype(np.float32)
        codes = blocks.reshape(2, size)[:, BLOCK_HEADS[kind] :]
        odd = ~np.isfinite(halves)
        if kind == "Q8_0":
            odd |= np.signbit(halves) | ((halves == 0) & codes.any(axis=1, keepdims=True))
        assert odd.any()
        return
    assert np.array_equal(dequantised_bits(packed), bits_of_gguf(blocks, kind))


def test_a_negative_step_would_lose_the_sign_of_zero_and_is_refused() -> None:
    block = np.concatenate([np.array([-0.5], dtype="<f2").view(np.uint8), np.zeros(32, dtype=np.uint8)])[None]
    assert bits_of_gguf(block, "Q8_0")[0, 0] == 0x80000000
    with pytest.raises(ValueError, match="a Q8_0 block whose step is negative"):
        repack(block, "Q8_0")


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q6_K"])
def test_other_block_types_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} has no exact affine form; only Q4_1 and Q8_0 have"):
        repack(np.zeros((1, 32), dtype=np.uint8), kind)


def test_rows_that_alternate_become_two_halves_in_each_head() -> None:
    rows = np.arange(16)[:, None]
    assert unpermute_rows(rows, 2)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_packed_rows_move_like_dense_rows() -> None:
    blocks = quantize(np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32), GGMLQuantizationType.Q4_1)
    moved = bits_of_gguf(unpermute_rows(blocks, 4), "Q4_1")
    assert np.array_equal(moved, unpermute_rows(bits_of_gguf(blocks, "Q4_1"), 4))
