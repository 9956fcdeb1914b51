"""GGUF's blocks of 32 weights as packed affine weights, without losing a bit.

Guarantees: the repacked form dequantises to the same float32 values, bit for bit, the sign of zero included. Q4_1 is the
affine formula itself; Q8_0 becomes codes from 0 to 255 with a bias of -128 steps, exact because a float16 step times an
8-bit code fits float32. Blocks for which that does not hold, and every other block type, are refused (Q4_0 among them: its
steps may be negative, and then its zeros are). Scales and biases stay float32: bfloat16 cannot hold a float16.
Source: the block layouts of ggml (a float16 step, for Q4_1 a float16 minimum, then codes; 4-bit codes hold elements 0-15
in the low nibbles and 16-31 in the high ones).
"""

from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Dtype = TypeVar("Dtype", bound=np.generic)
GROUP_SIZE: Final = 32
BLOCK_BYTES: Final = {"Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A packed affine matrix.

    Attributes:
        weight: uint32 words, shape (rows, columns * bits / 32), lowest bits first.
        scales: float32, shape (rows, columns / 32).
        biases: float32, shape (rows, columns / 32).
        bits: 4 or 8.
    """

    weight: npt.NDArray[np.uint32]
    scales: Floats
    biases: Floats
    bits: int


def repack(blocks: Bytes, block_type: str) -> Packed:
    """Repack rows of blocks.

    Args:
        blocks: Raw bytes, shape (rows, columns / 32 * bytes per block).
        block_type: `Q4_1` or `Q8_0`.

    Raises:
        ValueError: The block type, or a block, has no exact affine form.
    """
    if block_type not in BLOCK_BYTES:
        raise ValueError(f"{block_type} has no exact affine form; only {' and '.join(BLOCK_BYTES)} have")
    block = blocks.reshape(blocks.shape[0], -1, BLOCK_BYTES[block_type])
    scales = _float16(block[:, :, 0:2])
    if block_type == "Q8_0":
        signed = block[:, :, 2:].view(np.int8)
        _refuse_inexact(scales, signed)
        codes = (signed.astype(np.int16) + 128).astype(np.uint8)
        return Packed(weight=_words(codes), scales=scales, biases=scales * np.float32(-128), bits=8)
    biases = _float16(block[:, :, 2:4])
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ValueError("a Q4_1 block whose step or minimum is not finite")
    nibbles = block[:, :, 4:]
    codes = np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=2)
    pairs = codes[:, :, 0::2] | (codes[:, :, 1::2] << np.uint8(4))
    return Packed(weight=_words(pairs), scales=scales, biases=biases, bits=4)


def unpermute_rows(rows: npt.NDArray[Dtype], heads: int) -> npt.NDArray[Dtype]:
    """Undo the row order that GGUF files of llama models keep q and k projections in.

    There, each head's rows alternate between the two halves that the rotation pairs; here, as on the hub, the halves
    follow each other. Only rows move, so packed rows can be given as well.

    Args:
        rows: Shape (heads * head width, ...).
        heads: Query heads for q, key heads for k.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _refuse_inexact(steps: Floats, codes: npt.NDArray[np.int8]) -> None:
    """A code times a step must not be -0.0, which the affine sum cannot give."""
    odd = ~np.isfinite(steps) | np.signbit(steps) | ((steps == 0) & (codes != 0).any(axis=2))
    if odd.any():
        raise ValueError("a Q8_0 block whose step is negative, not finite, or zero with codes that are not")


def _float16(two_bytes: Bytes) -> Floats:
    return np.ascontiguousarray(two_bytes).view("<f2")[:, :, 0].astype(np.float32)


def _words(codes: Bytes) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(codes).reshape(codes.shape[0], -1).view("<u4")
