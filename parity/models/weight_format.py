"""Packed weight formats of tiny snapshots: affine of any width, and the three microscaling floats.

Guarantees: numpy integer and IEEE 754 arithmetic alone, so the packed words are the same on every machine. The encoders are
plain ones, not mlx's: any valid words do, since engine and oracle read the same ones; what is tested is how they are read.
Layout: elements of a row fill 32-bit words from the lowest bit up (spec/kv.md section 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from parity.models.bfloat16 import round_to_bfloat16
from parity.tensor import Tensor

E2M1: Final = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
BIASED: Final = 127  # exponent bias of an E8M0 scale


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How one module's weight is packed.

    Attributes:
        mode: `affine`, `mxfp4`, `nvfp4` or `mxfp8`.
        bits: Width of an element.
        group_size: Elements of a row that share a scale.
    """

    mode: str
    bits: int
    group_size: int

    def entry(self) -> dict[str, object]:
        """The words that config.json has for it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


FORMATS: Final[Mapping[str, WeightFormat]] = {
    "q4g32": WeightFormat(mode="affine", bits=4, group_size=32),
    "q4g64": WeightFormat(mode="affine", bits=4, group_size=64),
    "q8g64": WeightFormat(mode="affine", bits=8, group_size=64),
    "mxfp4": WeightFormat(mode="mxfp4", bits=4, group_size=32),
    "nvfp4": WeightFormat(mode="nvfp4", bits=4, group_size=16),
    "mxfp8": WeightFormat(mode="mxfp8", bits=8, group_size=32),
}


def packed(values: npt.NDArray[np.float32], form: WeightFormat) -> dict[str, Tensor]:
    """Pack a weight [..., in] into `weight`, `scales` and, for affine, `biases`, named by these leaves."""
    groups = values.reshape(*values.shape[:-1], -1, form.group_size)
    if form.mode == "affine":
        codes, scales, biases = _affine(groups, form.bits)
        extra = {"scales": _bf16(scales), "biases": _bf16(biases)}
    elif form.mode in ("mxfp4", "mxfp8"):
        top = np.float32(6 if form.mode == "mxfp4" else 448)
        exponents = _exponent_at_least(np.abs(groups).max(axis=-1) / top)
        steps: npt.NDArray[np.float32] = np.ldexp(np.float32(1), exponents).astype(np.float32)
        scaled = groups / steps[..., None]
        codes = _e2m1(scaled) if form.mode == "mxfp4" else e4m3(scaled)
        extra = {"scales": Tensor.of((exponents + BIASED).astype(np.uint8))}
    else:
        scale_codes = e4m3(np.abs(groups).max(axis=-1) / np.float32(6))
        scale_codes = np.maximum(scale_codes, np.uint8(1))  # never zero
        codes = _e2m1(groups / _e4m3_values()[scale_codes][..., None])
        extra = {"scales": Tensor.of(scale_codes)}
    return {"weight": Tensor.of(pack_words(codes.reshape(values.shape), form.bits)), **extra}


def pack_words(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """Codes [..., n] of `bits` bits into uint32 words [..., n * bits / 32], lowest bits first."""
    spread = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    stream = np.packbits(spread.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(stream).view("<u4")


def _affine(
    groups: npt.NDArray[np.float32], bits: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    scales = _through_bf16(np.maximum((high - low) / np.float32(2**bits - 1), np.float32(2**-20)))
    biases = _through_bf16(low)
    steps = np.rint((groups - biases[..., None]) / scales[..., None])
    return np.clip(steps, 0, 2**bits - 1).astype(np.uint8), scales, biases


def _exponent_at_least(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The least e with 2**e >= value, for positive values; -20 for zero."""
    mantissa, exponent = np.frexp(np.maximum(values, np.float32(2**-20)))
    return np.where(mantissa == np.float32(0.5), exponent - 1, exponent).astype(np.int64)


def _e2m1(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Nearest of the sixteen 4-bit floats; the smaller magnitude on a tie."""
    middles = (E2M1[1:] + E2M1[:-1]) / np.float32(2)
    magnitude = np.searchsorted(middles, np.abs(values), side="left").astype(np.uint8)
    return magnitude | (np.signbit(values).astype(np.uint8) << np.uint8(3))


def e4m3(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Nearest of the 8-bit floats with four exponent and three mantissa bits; largest 448, no infinity."""
    table = _e4m3_values()[:127]
    middles = (table[1:] + table[:-1]) / np.float32(2)
    magnitude = np.searchsorted(middles, np.abs(values), side="left").astype(np.uint8)
    return magnitude | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Values of the codes 0..126."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, (codes & 7).astype(np.float32)
    normal = (1 + mantissa / 8) * np.ldexp(np.float32(1), exponent - 7)
    return np.where(exponent == 0, mantissa / 8 * np.float32(2**-6), normal).astype(np.float32)


def _through_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (round_to_bfloat16(values).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bf16(values: npt.NDArray[np.float32]) -> Tensor:
    return Tensor.of(round_to_bfloat16(values), "BF16")
