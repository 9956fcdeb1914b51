"""Matrices in blocks of 8-bit floats: how the hub stores the large DeepSeek models.

A weight is one byte an element (sign, four exponent bits, three mantissa bits); each tile of 128 x 128 has a float32 factor
in `weight_scale_inv`, tiles at the edge are cut off. The oracle's loader multiplies and rounds to bfloat16.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from parity.models.weight_format import e4m3
from parity.tensor import Tensor

TILE: Final = 128
LARGEST: Final = np.float32(448)  # of an 8-bit float


def with_block_float8(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The named matrices [out, in] as bytes beside their factors, `NAME_scale_inv` [ceil(out / 128), ceil(in / 128)]."""
    out = dict(tensors)
    for name in names:
        values = tensors[name].values().astype(np.float32)
        factors = _factors(values)
        spread = np.repeat(np.repeat(factors, TILE, axis=0), TILE, axis=1)[: values.shape[0], : values.shape[1]]
        out |= {name: Tensor.of(e4m3(values / spread)), f"{name}_scale_inv": Tensor.of(factors)}
    return out


def _factors(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Largest magnitude of each tile over that of an 8-bit float."""
    rows, columns = (range(0, size, TILE) for size in values.shape)
    tops = [[np.abs(values[i : i + TILE, j : j + TILE]).max() for j in columns] for i in rows]
    return (np.array(tops, dtype=np.float32) / LARGEST).astype(np.float32)
