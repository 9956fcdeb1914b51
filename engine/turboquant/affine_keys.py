"""Keys of the key-value-width form: groups of 32, affine with a rounded zero, never rotated.

Guarantees: all arithmetic is float32, whatever the keys' dtype; only codes, scale and zero are kept, the last two as float16. A
group of equal elements has scale 0, so its zero is infinite or not a number in float16 and it decodes to no number: a defect of
the published codec that is kept on purpose, because codes are compared with it.
Source: spec/kv.md section 6.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.turboquant.bit_stream import pack, unpack

WIDTHS: Final = (2, 4, 5, 8)
GROUP: Final = 32  # elements of a head that share a scale and a zero
TINY: Final = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedKeys:
    """Keys of all heads.

    Attributes:
        codes: uint8 stream [B, K, T, E * bits / 8]; int8 codes [B, K, T, E] for 8 bits.
        scales: float16 [B, K, T, E / 32].
        zeros: float16 [B, K, T, E / 32].
    """

    codes: mx.array
    scales: mx.array
    zeros: mx.array


def encode(keys_BKTE: mx.array, bits: int) -> CodedKeys:
    """Code keys.

    Args:
        keys_BKTE: Any floating dtype; E a multiple of 32.
        bits: 2, 4 or 5 (codes from 0), or 8 (codes from -127 to 127).

    Numerics: scale and zero are rounded to float16 only after the codes were made with them.
    """
    grouped = keys_BKTE.astype(mx.float32).reshape(*keys_BKTE.shape[:-1], -1, GROUP)
    low, high = grouped.min(axis=-1, keepdims=True), grouped.max(axis=-1, keepdims=True)
    if bits == 8:
        least, most = -127, 127
        scales = (high - low) / (most - least)
        zeros = mx.round((high + low) / (2.0 * (scales + TINY)))
    else:
        least, most = 0, 2**bits - 1
        scales = (high - low) / most
        zeros = mx.round(low / (scales + TINY))
    codes = mx.clip(mx.round(grouped / (scales + TINY) - zeros), least, most).reshape(keys_BKTE.shape)
    stored = codes.astype(mx.int8) if bits == 8 else pack(codes.astype(mx.uint8), bits)
    return CodedKeys(
        codes=stored, scales=scales.squeeze(-1).astype(mx.float16), zeros=zeros.squeeze(-1).astype(mx.float16)
    )


def decode(keys: CodedKeys, bits: int) -> mx.array:
    """The keys that codes stand for, bfloat16 [B, K, T, E].

    Numerics: computed in float32 from the stored scale and zero, rounded once.
    """
    width = keys.scales.shape[-1] * GROUP
    codes = keys.codes if bits == 8 else unpack(keys.codes, bits, width)
    grouped = codes.astype(mx.float32).reshape(*codes.shape[:-1], -1, GROUP)
    scales, zeros = (stored[..., None].astype(mx.float32) for stored in (keys.scales, keys.zeros))
    return ((grouped + zeros) * scales).reshape(codes.shape).astype(mx.bfloat16)
