"""Where two tensors part, counted in elements and in ULPs.

Guarantees: the match is decided on unsigned-integer views of the stored bits alone, so -0.0 differs from 0.0, equal NaN
payloads are equal and unequal ones are not. No tolerance exists here. ULPs describe a difference; they decide nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import numpy as np
import numpy.typing as npt

from parity.tensor import FLOATS, Tensor


class Match(Enum):
    """Outcome for one tensor."""

    IDENTICAL = "IDENTICAL"
    DIFFERENT = "DIFFERENT"
    INCOMPARABLE = "INCOMPARABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """How `actual` departs from `expected`.

    Attributes:
        match: INCOMPARABLE where dtype or shape differ: there is no element to compare.
        expected_kind: dtype and shape, as `F32[1, 512]`.
        actual_kind: Likewise.
        num_elements: Elements compared.
        num_different: Elements whose bits differ.
        first: Index of the first differing element in row-major order.
        expected_bits: Its bits in `expected`.
        actual_bits: Its bits in `actual`.
        max_ulp: Largest distance in units in the last place; None for integer dtypes and where nothing differs.
        ulp_histogram: Differing elements by distance: key 0 holds -0.0 against 0.0, key 2^k the distances from 2^k to
            2^(k+1) - 1; empty for integer dtypes.
    """

    match: Match
    expected_kind: str
    actual_kind: str
    num_elements: int = 0
    num_different: int = 0
    first: tuple[int, ...] | None = None
    expected_bits: int | None = None
    actual_bits: int | None = None
    max_ulp: int | None = None
    ulp_histogram: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, expected: Tensor, actual: Tensor) -> Self:
        """Compare stored bits."""
        want_kind, got_kind = kind(expected), kind(actual)
        if want_kind != got_kind:
            return cls(match=Match.INCOMPARABLE, expected_kind=want_kind, actual_kind=got_kind)
        want, got = expected.bits().reshape(-1), actual.bits().reshape(-1)
        where = np.flatnonzero(want != got)
        if where.size == 0:
            return cls(match=Match.IDENTICAL, expected_kind=want_kind, actual_kind=got_kind, num_elements=want.size)
        distances = ulp_distance(want[where], got[where]) if expected.dtype in FLOATS else None
        return cls(
            match=Match.DIFFERENT,
            expected_kind=want_kind,
            actual_kind=got_kind,
            num_elements=want.size,
            num_different=where.size,
            first=tuple(int(i) for i in np.unravel_index(where[0], expected.shape)),
            expected_bits=int(want[where[0]]),
            actual_bits=int(got[where[0]]),
            max_ulp=None if distances is None else int(distances.max()),
            ulp_histogram={} if distances is None else ulp_histogram(distances),
        )

    @property
    def dtype(self) -> str:
        """dtype of `expected`."""
        return self.expected_kind.partition("[")[0]

    def at_first(self) -> str:
        """`[0, 41]: expected 0x3f9d0000 (1.2265625), actual 0x3f9d0001 (1.2265626), 1 ULP`; empty if nothing differs."""
        if self.first is None or self.expected_bits is None or self.actual_bits is None:
            return ""
        text = (
            f"{list(self.first)}: expected {written(self.dtype, self.expected_bits)}, "
            f"actual {written(self.dtype, self.actual_bits)}"
        )
        if self.max_ulp is None:
            return text
        word = np.dtype(f"<u{_width(self.dtype)}")
        distance = ulp_distance(np.array([self.expected_bits], word), np.array([self.actual_bits], word))
        return f"{text}, {int(distance[0])} ULP"

    def counted(self) -> str:
        """`12 of 512 elements, at most 2 ULP`."""
        text = f"{self.num_different} of {self.num_elements} elements"
        return text if self.max_ulp is None else f"{text}, at most {self.max_ulp} ULP"


def ulp_distance(
    expected: npt.NDArray[np.unsignedinteger], actual: npt.NDArray[np.unsignedinteger]
) -> npt.NDArray[np.uint64]:
    """Steps between neighbouring floats, elementwise; 0 between -0.0 and 0.0.

    Args:
        expected: Bits of floats as unsigned integers of the floats' width.
        actual: Bits of the same width and shape.
    """
    sign = np.uint64(1) << np.uint64(8 * expected.dtype.itemsize - 1)
    a, b = expected.astype(np.uint64), actual.astype(np.uint64)
    magnitude_a, magnitude_b = a & (sign - np.uint64(1)), b & (sign - np.uint64(1))
    apart = np.maximum(magnitude_a, magnitude_b) - np.minimum(magnitude_a, magnitude_b)
    across = magnitude_a + magnitude_b  # fits: two 63-bit magnitudes
    return np.where((a & sign) == (b & sign), apart, across)


def ulp_histogram(distances: npt.NDArray[np.uint64]) -> dict[int, int]:
    """Count distances by power of two: keys 0, 1, 2, 4, 8, ...; only keys that occur, ascending."""
    lengths = [int(d).bit_length() for d in distances.reshape(-1)]
    found, counts = np.unique(np.array(lengths, dtype=np.int64), return_counts=True)
    return {(1 << (int(n) - 1)) if n else 0: int(c) for n, c in zip(found, counts, strict=True)}


def kind(tensor: Tensor) -> str:
    """dtype and shape, as `F32[1, 512]`."""
    return f"{tensor.dtype}{list(tensor.shape)}"


def written(dtype: str, bits: int) -> str:
    """One element for people: `0x3f9d0000 (1.2265625)` for floats, `-7` for integers; shortest digits that read back."""
    width = _width(dtype)
    value = Tensor(dtype=dtype, shape=(1,), data=bits.to_bytes(width, "little")).values()[0]
    if dtype not in FLOATS:
        word = bits - (1 << 8 * width) if dtype.startswith("I") and bits >> (8 * width - 1) else bits
        return str(word)
    shortest = np.float64(value) if dtype == "F64" else np.float32(value)
    return f"0x{bits:0{2 * width}x} ({shortest!s})"


def _width(dtype: str) -> int:
    return {"BF16": 2}.get(dtype) or int(dtype[1:]) // 8
