"""Rows as blocks of columns: all columns of a block at one k stand together, so that one vector load takes them.

Guarantees: nothing is lost; `rows_of` is the inverse of `blocks_of`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.arena import WEIGHTS


def blocks_of(rows: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """[out, in] as [blocks, in, columns], zeros where the last block has no output."""
    outputs, inner = rows.shape
    if missing := -outputs % columns:
        rows = np.concatenate([rows, np.zeros((missing, inner), rows.dtype)])
    return rows.reshape(-1, columns, inner).transpose(0, 2, 1)


def rows_of(blocks: npt.NDArray[Any], outputs: int) -> npt.NDArray[Any]:
    """[blocks, in, columns] as [out, in]."""
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1, blocks.shape[1])[:outputs]


def on_a_line(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A contiguous copy that begins on a line of the processor's cache: no vector that is loaded lies on two."""
    copy = WEIGHTS.array(array.shape, array.dtype)
    copy[...] = array
    return copy


def address_of(array: npt.NDArray[Any]) -> int:
    """Where the data of a contiguous array stands."""
    address: int = array.__array_interface__["data"][0]
    return address
