"""Rows of logits for sampler cases: generated ones that are hard on samplers, and rounding to a case's dtype.

Guarantees: generated from raw PCG64 words and exact arithmetic, hence the same bits on every machine and with every numpy;
rounding is to nearest, ties to even, done here once for the oracle and for the engine.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from parity.case import DType
from parity.errors import CaseError
from parity.tensor import Tensor

VOCABULARY: Final = 256
Floats = npt.NDArray[np.float32]


def _flat(words: npt.NDArray[np.int64]) -> Floats:
    """All tokens alike."""
    return np.full(words.shape, -3.25, np.float32)


def _masked(words: npt.NDArray[np.int64]) -> Floats:
    """Three in four tokens ruled out, the others spread in steps of 1/64."""
    return np.where(words % 4 == 0, (words >> 4) % 1024 / 64, -np.inf).astype(np.float32)


def _one_hot(words: npt.NDArray[np.int64]) -> Floats:
    """One token far above the rest: with others possible in rows 0 and 1, ruled out in 2 and 3."""
    rows = np.zeros(words.shape, np.float32)
    rows[2:] = -np.inf
    rows[np.arange(len(rows)), words[:, 0] % VOCABULARY] = 30
    return rows


def _spread(words: npt.NDArray[np.int64]) -> Floats:
    """From -64 to 64 in steps of 2**-10."""
    return (words % (1 << 17) / 1024 - 64).astype(np.float32)


def _ties(words: npt.NDArray[np.int64]) -> Floats:
    """Eight levels: every cut falls among tokens that tie."""
    return (words % 8 / 2 - 1).astype(np.float32)


GENERATED: Final[dict[str, Callable[[npt.NDArray[np.int64]], Floats]]] = {
    "flat": _flat,
    "masked": _masked,
    "one-hot": _one_hot,
    "spread": _spread,
    "ties": _ties,
}


def generated_rows(name: str, num_rows: int) -> Floats:
    """Rows [num_rows, 256] of a name.

    Raises:
        CaseError: There are none of this name.
    """
    if name not in GENERATED:
        raise CaseError(
            f"unknown rows {name!r}",
            known=f"model, {', '.join(GENERATED)}",
            next_step="correct it in parity/cases/*.toml",
        )
    seed = int.from_bytes(hashlib.sha256(f"rows/{name}".encode()).digest())
    words = np.random.PCG64(seed).random_raw(num_rows * VOCABULARY) >> np.uint64(44)  # 20 bits each
    return GENERATED[name](words.astype(np.int64).reshape(num_rows, VOCABULARY))


def rounded(rows: npt.NDArray[Any], dtype: DType) -> tuple[Tensor, ...]:
    """Each row of float32 values [num_rows, V] as a tensor [1, V] of the dtype."""
    if dtype == "bf16":
        words = np.ascontiguousarray(rows, dtype="<f4").view("<u4")
        nearest = ((words + np.uint32(0x7FFF) + ((words >> 16) & 1)) >> 16).astype("<u2")
        return tuple(Tensor.of(row[None], dtype="BF16") for row in nearest)
    return tuple(Tensor.of(row[None]) for row in rows.astype({"f32": "<f4", "f16": "<f2"}[dtype]))
