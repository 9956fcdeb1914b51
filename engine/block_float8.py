"""Matrices stored as tiles of 8-bit floats, as the hub has the large DeepSeek models: unpacked as they are opened.

Each byte is a sign, four bits of exponent and three of mantissa; a tile of 128 x 128 shares a float32 factor. The oracle
keeps no such matrix packed, and neither does the engine. Source: DeepSeek-AI 2024 (DeepSeek-V3), section 3.3.
"""

from typing import Final

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError

TILE: Final = 128
FACTORS: Final = "_scale_inv"


def unpack_tiles(checkpoint: Checkpoint) -> None:
    """Put a bfloat16 matrix in the place of every weight [out, in] that has factors, `WEIGHT_scale_inv` [out / 128, in / 128].

    Raises:
        CheckpointError: Factors without their weight, or not one a tile.

    Numerics: value and factor are multiplied in float32 and rounded to bfloat16, whatever dtype the engine computes in.
    """
    for factors in [name for name in checkpoint.names if name.endswith(FACTORS)]:
        weight = factors.removesuffix(FACTORS)
        shape, tiles = checkpoint.shape(weight), checkpoint.shape(factors)
        if shape is None or len(shape) != 2 or tiles != tuple(-(-size // TILE) for size in shape):
            raise CheckpointError(
                f"the factors of {weight} are not one a tile of {TILE} x {TILE}",
                weight=None if shape is None else list(shape),
                factors=None if tiles is None else list(tiles),
                next_step="take a snapshot as the hub has it, or a converted one",
            )
        checkpoint.replace([weight, factors], [weight], _unpacked)


def _unpacked(weight: mx.array, factors: mx.array) -> list[mx.array]:
    rows, columns = weight.shape
    spread = mx.repeat(mx.repeat(factors, TILE, axis=0)[:rows], TILE, axis=1)[:, :columns]
    return [(mx.from_fp8(weight, dtype=mx.bfloat16) * spread).astype(mx.bfloat16)]
