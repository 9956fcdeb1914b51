"""A tensor as stored bits: dtype, shape and little-endian bytes, with no framework attached.

Guarantees: bits are never converted on the way in or out, so NaN payloads and the sign of zero survive, and bfloat16
stays bfloat16. It does no arithmetic; `values` is for describing a difference, never for judging one.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

ITEMSIZE: Final = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8, "U8": 1, "U16": 2, "U32": 4, "U64": 8}
FLOATS: Final = frozenset({"BF16", "F16", "F32", "F64"})
NUMPY: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "U8": "<u1", "U16": "<u2"}
NUMPY_UNSIGNED: Final = {"U32": "<u4", "U64": "<u8"}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Stored bits of one tensor.

    Attributes:
        dtype: safetensors name, one of `ITEMSIZE`.
        shape: Sizes, row-major.
        data: `prod(shape) * ITEMSIZE[dtype]` bytes, little endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        """Refuse a buffer that is not exactly as long as dtype and shape say."""
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(ITEMSIZE)}")
        size = math.prod(self.shape) * ITEMSIZE[self.dtype]
        if len(self.data) != size:
            raise ValueError(f"{self.dtype}{list(self.shape)} needs {size} bytes, got {len(self.data)}")

    @classmethod
    def of(cls, array: npt.NDArray[np.generic], dtype: str | None = None) -> "Tensor":
        """Keep a numpy array's bits.

        Args:
            array: Any numeric array; big-endian input is swapped, values never change.
            dtype: safetensors name where numpy has none (`"BF16"` over `uint16` words); derived when absent.
        """
        little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        name = dtype or f"{little.dtype.kind.upper()}{8 * little.dtype.itemsize}"
        return cls(dtype=name, shape=array.shape, data=little.tobytes())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over dtype, shape and data, in hex."""
        head = f"{self.dtype}{list(self.shape)}".encode()
        return hashlib.sha256(head + self.data).hexdigest()

    def bits(self) -> npt.NDArray[np.unsignedinteger]:
        """The same memory as unsigned integers of the same width, shape `self.shape`."""
        return np.frombuffer(self.data, dtype=f"<u{ITEMSIZE[self.dtype]}").reshape(self.shape)

    def values(self) -> npt.NDArray[np.float64]:
        """The values widened to float64 (exact for every float dtype), shape `self.shape`."""
        if self.dtype == "BF16":
            wide = (self.bits().astype("<u4") << np.uint32(16)).view("<f4")
        else:
            wide = np.frombuffer(self.data, dtype={**NUMPY, **NUMPY_UNSIGNED}[self.dtype]).reshape(self.shape)
        return wide.astype(np.float64)
