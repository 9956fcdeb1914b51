"""Experts as gpt_oss has them on the hub: mxfp4 blocks, gate and up in one tensor.

The blocks are bytes and hold the very words that mlx packs, so they are viewed, never unpacked. Even rows of `gate_up_proj`
belong to the gate, odd ones to up.
"""

from typing import Final

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.linear import Packed
from engine.mlp import GatedActivation
from engine.moe import ExpertLinear, GatedExperts
from engine.quantization import Format

FORMAT: Final = Format(bits=4, group_size=32, mode="mxfp4")
BLOCK: Final = FORMAT.group_size * FORMAT.bits // 8  # bytes that share a scale


def has_blocks(checkpoint: Checkpoint, path: str) -> bool:
    """Whether the experts at `path` stand in blocks."""
    return f"{path}.gate_up_proj_blocks" in checkpoint


def take_blocks(
    checkpoint: Checkpoint, path: str, *, experts: int, width: int, inner: int, activation: GatedActivation
) -> GatedExperts:
    """Take blocks, scales and biases of `gate_up_proj` and `down_proj` from the checkpoint.

    Raises:
        CheckpointError: A tensor is missing or misshapen, or config.json does not say that there are blocks.
    """
    if checkpoint.quantization.format_of(path) != FORMAT:
        raise CheckpointError(
            f"{path} stands in mxfp4 blocks but config.json does not say so",
            found=f"{path}.gate_up_proj_blocks",
            next_step="take the config.json that belongs to these weights",
        )

    def take(name: str, *, inputs: int, outputs: int) -> tuple[mx.array, mx.array, mx.array]:
        shape = (experts, outputs, inputs // FORMAT.group_size, BLOCK)
        blocks = checkpoint.take(f"{path}.{name}_blocks", shape, stored=mx.uint8)
        scales = checkpoint.take(f"{path}.{name}_scales", shape[:-1], stored=mx.uint8)
        return blocks.view(mx.uint32).flatten(-2), scales, checkpoint.take(f"{path}.{name}_bias", shape[:2])

    def linear(words: mx.array, scales: mx.array, bias: mx.array) -> ExpertLinear:
        return ExpertLinear(weight=Packed(weight=words, scales=scales, biases=None, format=FORMAT), bias=bias)

    both = take("gate_up_proj", inputs=width, outputs=2 * inner)
    return GatedExperts(
        path=path,
        gate=linear(*(mx.contiguous(array[:, 0::2]) for array in both)),
        up=linear(*(mx.contiguous(array[:, 1::2]) for array in both)),
        down=linear(*take("down_proj", inputs=inner, outputs=width)),
        activation=activation,
    )
