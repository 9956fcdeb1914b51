"""Values of the key-value-width form: signs, a Walsh-Hadamard transform, unit RMS in groups of 32, then codes.

The transform makes elements nearly normal, whatever the values are, so one frozen table serves all layers.

Guarantees: float32 throughout; only codes and the groups' RMS (float16) are kept. The transform is its own inverse up to the
signs, so a weighted sum may be turned back after it was summed.
Source: spec/kv.md section 6.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.turboquant.bit_stream import pack, unpack
from engine.turboquant.value_tables import boundaries, centroids

WIDTHS: Final = (2, 3, 4, 5, 8)
HEADS: Final = (64, 128, 256, 512)  # head widths for which signs are published
GROUP: Final = 32
TINY: Final = 1e-8
SEED: Final = 42


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedValues:
    """Values of all heads, rotated.

    Attributes:
        codes: uint8 stream [B, K, T, E * bits / 8].
        scales: RMS of each group, float16 [B, K, T, E / 32].
    """

    codes: mx.array
    scales: mx.array


def signs(width: int) -> mx.array:
    """The signs of a head's elements, int32 [E], 1 or -1."""
    return 1 - 2 * mx.random.randint(0, 2, shape=(width,), key=mx.random.key(SEED))


def rotate(values: mx.array) -> mx.array:
    """Signs, then the normalised transform along the last axis, in float32."""
    return mx.hadamard_transform(values.astype(mx.float32) * signs(values.shape[-1]))


def unrotate(rotated: mx.array) -> mx.array:
    """The inverse of `rotate`, in float32."""
    return mx.hadamard_transform(rotated.astype(mx.float32)) * signs(rotated.shape[-1])


def encode(values_BKTE: mx.array, bits: int) -> CodedValues:
    """Code values.

    Args:
        values_BKTE: Any floating dtype; E one of `HEADS`.
        bits: One of `WIDTHS`.
    """
    rotated = rotate(values_BKTE)
    grouped = rotated.reshape(*rotated.shape[:-1], -1, GROUP)
    scales = mx.sqrt(mx.mean(grouped**2, axis=-1, keepdims=True))
    unit = grouped / (scales + TINY)
    codes = mx.zeros(unit.shape, dtype=mx.uint32)
    for boundary in boundaries(bits):
        codes = codes + (unit > boundary)
    stored = codes.reshape(rotated.shape).astype(mx.uint8)
    return CodedValues(codes=stored if bits == 8 else pack(stored, bits), scales=scales.squeeze(-1).astype(mx.float16))


def decode_rotated(values: CodedValues, bits: int) -> mx.array:
    """The rotated values that codes stand for, float32 [B, K, T, E]."""
    width = values.scales.shape[-1] * GROUP
    codes = values.codes if bits == 8 else unpack(values.codes, bits, width)
    unit = mx.take(centroids(bits), codes.astype(mx.int32), axis=0)
    grouped = unit.reshape(*codes.shape[:-1], -1, GROUP) * values.scales[..., None].astype(mx.float32)
    return grouped.reshape(codes.shape)


def decode(values: CodedValues, bits: int) -> mx.array:
    """The values that codes stand for, bfloat16 [B, K, T, E].

    Numerics: turned back in float32, rounded once.
    """
    return unrotate(decode_rotated(values, bits)).astype(mx.bfloat16)
