"""A sketch of large rows: enough to say how far off an engine is when its digests say that it is off.

Per step: the 64 largest logits with their ids, 256 logits at fixed strides, and the log of the sum of exponentials; about
1.3 KB. A sketch describes; it never decides: only the SHA-256 of the whole row does.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from parity.tensor import Tensor
from parity.trace import Trace

TOP: Final = 64
STRIDED: Final = 256


def sketch(trace: Trace, num_steps: int) -> dict[str, Tensor]:
    """Sketch the rows of a trace of batch 1.

    Returns:
        `top_ids` I32 [steps, 64], ties broken by the lower id; `top_values` [steps, 64] and `strided` [steps, 256] as stored
        bits in the rows' own dtype; `logsumexp` F32 [steps].
    """
    rows = [trace.logits(step) for step in range(num_steps)]
    tops = [top_ids(row) for row in rows]
    strides = strided_ids(rows[0].shape[-1])
    return {
        "logsumexp": Tensor.of(np.array([_logsumexp(row) for row in rows], dtype="<f4")),
        "strided": gather(rows, [strides] * num_steps),
        "top_ids": Tensor.of(np.stack(tops).astype("<i4")),
        "top_values": gather(rows, tops),
    }


def top_ids(row: Tensor, count: int = TOP) -> npt.NDArray[np.int64]:
    """Ids of the `count` largest logits of a [1, V] row, largest first, the lower id first on a tie."""
    values = row.values().reshape(-1)
    return np.lexsort((np.arange(values.size), -values))[:count]


def strided_ids(vocabulary: int) -> npt.NDArray[np.int64]:
    """The 256 ids that every sketch of this vocabulary size samples."""
    return np.arange(STRIDED, dtype=np.int64) * vocabulary // STRIDED


def gather(rows: list[Tensor], ids: list[npt.NDArray[np.int64]]) -> Tensor:
    """Stored bits of `ids` of each [1, V] row, shape [len(rows), len(ids[0])]."""
    picked = np.stack([row.bits().reshape(-1)[i] for row, i in zip(rows, ids, strict=True)])
    return Tensor.of(picked, dtype=rows[0].dtype)


def _logsumexp(row: Tensor) -> float:
    """In float64 with an exactly rounded sum, so that rounding to float32 gives the same bits on any machine."""
    values = row.values().reshape(-1)
    top = float(values.max())
    return top + math.log(math.fsum(math.exp(v - top) for v in values.tolist()))
