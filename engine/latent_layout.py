"""From the hub's layout of latent attention to the one that the layers read.

The hub has one matrix from the latent to every head's key and value, and layers after the last one that predict further
tokens. Which layout a checkpoint has is seen by its names.

Source: spec/models.md section 7.
"""

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.errors import ConfigError


def further_layers(layers: int, further: int) -> dict[str, str]:
    """Patterns of the tensors to be dropped: those of `further` layers after the `layers` of the model."""
    numbers = range(layers, layers + further)
    return {rf"model\.layers\.{number}\..+": "predicts a further token; not computed" for number in numbers}


def split_joint_projection(checkpoint: Checkpoint, path: str, *, heads: int, rank: int, own: int, value: int) -> None:
    """Where the checkpoint has `kv_b_proj` [H * (N + E), C], put `embed_q` [H, C, N] and `unembed_out` [H, E, C] in its place.

    Args:
        checkpoint: Whose tensors are replaced.
        path: Module path of the attention layer.
        heads: H.
        rank: C, elements of a latent.
        own: N, elements of a key that are a head's own.
        value: E, elements of a value.

    Raises:
        ConfigError: It has another number of rows.
        CheckpointError: Both layouts are there.

    Numerics: dense bits are moved. A packed matrix is unpacked, cut and packed again with its own width and group, which
        rounds, in the dtype of the file.
    """
    joint = f"{path}.kv_b_proj"
    shape = checkpoint.shape(f"{joint}.weight")
    if shape is None:
        return
    packed = f"{joint}.scales" in checkpoint

    def cut(weight: mx.array) -> list[mx.array]:
        weight_HJC = weight.reshape(heads, own + value, -1)
        return [mx.contiguous(weight_HJC[:, :own].swapaxes(-1, -2)), mx.contiguous(weight_HJC[:, own:])]

    def unpack_and_cut(weight: mx.array, scales: mx.array, biases: mx.array) -> list[mx.array]:
        bits, group = weight.shape[-1] * 32 // rank, rank // scales.shape[-1]
        dense = mx.dequantize(weight, scales, biases, group_size=group, bits=bits)
        return [array for part in cut(dense) for array in mx.quantize(part, group_size=group, bits=bits)]

    leaves = ("weight", "scales", "biases") if packed else ("weight",)
    expected = heads * (own + value)
    if shape[0] != expected:
        raise ConfigError(
            f"{joint}.weight does not fit the heads of config.json",
            expected_rows=expected,
            found=list(shape),
            next_step="take the config.json that belongs to these weights",
        )
    checkpoint.replace(
        [f"{joint}.{leaf}" for leaf in leaves],
        [f"{path}.{part}.{leaf}" for part in ("embed_q", "unembed_out") for leaf in leaves],
        unpack_and_cut if packed else cut,
    )
