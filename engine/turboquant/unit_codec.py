"""Vectors of mlx-vlm's form: a norm, and the coded coordinates of the rotated unit vector.

The rotation is a Walsh-Hadamard transform after random signs. A coordinate of a random unit vector has one known density a
width, and the tables are Lloyd's for it. They are mlx-vlm's own, recorded from it (`oracles/mlx_vlm/run.py`): it computes them
in single precision at every start, so that their last bits, and codes near a boundary, depend on the machine's numpy.

Guarantees: bit-identical to mlx-vlm 0.6.3 on mlx's CPU backend, for the widths of `HEADS` and the codes of `CODES`.
Source: mlx-vlm 0.6.3, turboquant (facts); Zandieh et al. 2025 (TurboQuant), section 3.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np

from engine.turboquant.bit_stream import pack, unpack

TABLES: Final = Path(__file__).with_name("unit_tables.safetensors")
HEADS: Final = (32, 64, 128, 256, 512)
CODES: Final = (2, 3, 4, 8)
LEAST_NORM: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedVectors:
    """Vectors of all heads.

    Attributes:
        norms: float16 [B, K, T, 1].
        codes: uint32 stream [B, K, T, ceil(E * bits / 32)].
    """

    norms: mx.array
    codes: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCodec:
    """The codec of keys, or of values, of one layer.

    Attributes:
        width: E, one of `HEADS`.
        bits: One of `CODES`.
        seed: Of the signs; mlx-vlm takes 0 for keys and 1 for values.
    """

    width: int
    bits: int
    seed: int

    @property
    def table(self) -> mx.array:
        """Centroids, float32 [2**bits]."""
        return _tables()[f"{self.width}.{self.bits}"]

    @property
    def signs(self) -> mx.array:
        """float32 [E], 1 or -1."""
        drawn = np.random.default_rng(self.seed + self.width * 7919).choice([-1.0, 1.0], size=self.width)
        return mx.array(drawn.astype(np.float32))

    def rotate(self, vectors: mx.array) -> mx.array:
        """Signs, then the transform, along the last axis."""
        return mx.hadamard_transform(vectors * self.signs, scale=1.0 / math.sqrt(self.width))

    def unrotate(self, rotated: mx.array) -> mx.array:
        """The inverse of `rotate`."""
        return mx.hadamard_transform(rotated, scale=1.0 / math.sqrt(self.width)) * self.signs

    def encode(self, vectors_BKTE: mx.array) -> CodedVectors:
        """Code vectors of any floating dtype.

        Numerics: float32; the norm is rounded to float16 after the vector was divided by it.
        """
        vectors = vectors_BKTE.astype(mx.float32)
        norms = mx.linalg.norm(vectors, axis=-1, keepdims=True)
        rotated = self.rotate(vectors / mx.maximum(norms, LEAST_NORM))
        table = self.table
        codes = mx.zeros(rotated.shape, dtype=mx.uint32)
        for boundary in (table[:-1] + table[1:]) / 2:
            codes = codes + (rotated > boundary)
        return CodedVectors(norms=norms.astype(mx.float16), codes=pack(codes, self.bits, word=mx.uint32))

    def rotated_units(self, vectors: CodedVectors) -> mx.array:
        """Rotated unit vectors that codes stand for, float32 [B, K, T, E]."""
        return mx.take(self.table, unpack(vectors.codes, self.bits, self.width).astype(mx.int32), axis=0)

    def decode(self, vectors: CodedVectors) -> mx.array:
        """The vectors that codes stand for, float32 [B, K, T, E]."""
        return vectors.norms.astype(mx.float32) * self.unrotate(self.rotated_units(vectors))


@functools.cache
def _tables() -> dict[str, mx.array]:
    loaded = mx.load(str(TABLES))
    if not isinstance(loaded, dict):
        raise TypeError(f"{TABLES.name} holds no named tensors")
    return loaded
