"""The tensors of a snapshot in float64: rounded to a dtype as a run has them, then widened; packed ones unpacked.

Guarantees: a value is exactly what a run in that dtype starts from; unpacking is exact in float64. Names are those of the
oracle's own layout: a snapshot as on the hub, where that differs, is refused by name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from parity import safetensors_file
from parity.case import DType
from parity.models.bfloat16 import round_to_bfloat16
from parity.snapshot import Snapshot
from parity.tensor import FLOATS, Tensor

Array = npt.NDArray[np.float64]

STORED: Final[Mapping[str, str]] = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
KEPT: Final = 1 << 20  # elements: larger matrices are converted again each time, to spare memory
E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float64)


class NoTruthError(Exception):
    """There is no float64 truth for this: the family, a tensor's name or a KV mode is not among those that are written."""


@dataclass(slots=True, kw_only=True)
class Weights:
    """Tensors by name.

    Attributes:
        tensors: As stored.
        dtype: What floating tensors are rounded to.
        quantization: The config's entry; empty where nothing is packed.
    """

    tensors: Mapping[str, Tensor]
    dtype: DType
    quantization: Mapping[str, Any] = field(default_factory=dict)
    _kept: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def open(cls, snapshot: Snapshot, dtype: DType) -> Self:
        """Read every shard."""
        tensors: dict[str, Tensor] = {}
        for file in _shards(snapshot.path):
            tensors |= safetensors_file.loads(file.read_bytes())
        return cls(tensors=tensors, dtype=dtype, quantization=snapshot.quantization or {})

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.tensors

    def vector(self, name: str) -> Array:
        """A tensor of any shape that is not packed.

        Raises:
            NoTruthError: There is none of that name.
        """
        if name not in self.tensors:
            raise NoTruthError(f"the snapshot has no tensor {name}")
        if name not in self._kept:
            value = rounded(self.tensors[name], self.dtype)
            if value.size > KEPT:
                return value
            self._kept[name] = value
        return self._kept[name]

    def is_packed(self, path: str) -> bool:
        """Whether a module's weight is stored packed."""
        return f"{path}.scales" in self.tensors

    def matrix(self, path: str, rows: npt.NDArray[np.int64] | None = None) -> Array:
        """`<path>.weight`, unpacked where it is packed, [..., out, in]; only some rows where `rows` names them."""
        if not self.is_packed(path):
            whole = self.vector(f"{path}.weight")
            return whole if rows is None else whole[rows]
        key = f"{path}.weight, unpacked"
        if key in self._kept:
            return self._kept[key] if rows is None else self._kept[key][rows]
        entry = self.quantization.get(path, self.quantization)
        words, scales = (self.tensors[f"{path}.{leaf}"] for leaf in ("weight", "scales"))
        biases = self.tensors.get(f"{path}.biases")
        if rows is not None:
            words, scales = _rows(words, rows), _rows(scales, rows)
            biases = None if biases is None else _rows(biases, rows)
        value = unpack(words, scales, biases, entry, self.dtype)
        if rows is None and value.size <= KEPT:
            self._kept[key] = value
        return value


def rounded(tensor: Tensor, dtype: DType) -> Array:
    """A tensor's values after the cast that a run begins with."""
    values = tensor.values()
    if tensor.dtype not in FLOATS or tensor.dtype in (STORED[dtype], "BF16" if dtype == "f32" else ""):
        return values
    return to_dtype(values, dtype)


def to_dtype(values: Array, dtype: DType) -> Array:
    """Values rounded to nearest in a dtype, in float64."""
    if dtype == "bf16":
        words = round_to_bfloat16(values.astype(np.float32))
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return values.astype(np.float32 if dtype == "f32" else np.float16).astype(np.float64)


def unpack(words: Tensor, scales: Tensor, biases: Tensor | None, entry: Mapping[str, Any], dtype: DType) -> Array:
    """The weight [..., out, in] that packed words stand for: scale * code + bias, or scale * small float."""
    bits, group, mode = int(entry["bits"]), int(entry["group_size"]), str(entry.get("mode", "affine"))
    codes = _codes(words, bits).astype(np.int64)
    grouped = codes.reshape(*codes.shape[:-1], -1, group)
    if mode == "affine" and biases is not None:
        scale, bias = rounded(scales, dtype), rounded(biases, dtype)
        value: Array = scale[..., None] * grouped + bias[..., None]
    else:
        elements = E2M1 if bits == 4 else _e4m3()
        raw = scales.bits().astype(np.int64)
        steps = _e4m3()[raw] if mode == "nvfp4" else np.ldexp(1.0, raw - 127)
        value = steps[..., None] * elements[grouped]
    return value.reshape(codes.shape)


def _codes(words: Tensor, bits: int) -> npt.NDArray[np.uint8]:
    """Elements of packed rows, lowest bits first."""
    stream = np.unpackbits(np.ascontiguousarray(words.bits()).view(np.uint8), axis=-1, bitorder="little")
    return np.packbits(stream.reshape(*stream.shape[:-1], -1, bits), axis=-1, bitorder="little")[..., 0]


def _e4m3() -> Array:
    """The 256 values of a float with four exponent and three mantissa bits, by code."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, np.ldexp(mantissa / 8.0, -6), np.ldexp(1 + mantissa / 8.0, exponent - 7))
    return np.where(code & 128, -value, value)


def _rows(tensor: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    return Tensor.of(tensor.bits()[rows], dtype=tensor.dtype)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))
