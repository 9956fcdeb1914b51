# ruff: noqa: ANN001, ANN201 - Numba reads these signatures; what is compiled takes numbers only
# mypy: disable-error-code="untyped-decorator,no-untyped-def,import-untyped,var-annotated,call-arg,unreachable"
"""When the processor's own conversion to bfloat16 gives the bits of rounding: where no subnormal number can turn up.

The conversion takes subnormal numbers for zero; everything else it rounds to even, as mlx does. A bfloat16 of at least 2^e is
a multiple of 2^(e-7), and so is a sum of such numbers. So with scales and biases that are zero or at least 2^-40, a weight is
zero or at least 2^-47; with inputs that are zero or at least 2^-60, a product is zero or at least 2^-107, and every sum of
rounded products zero or at least 2^-114: all far above 2^-126, where subnormal numbers begin.

Guarantees: weights are looked at once, every one of them; inputs in every call, every one of them. What is not tame is rounded
step by step, and gives the same bits.

With float32 activations it is the scales alone that count: where scale * q is exact, as it is with scales of a 16-bit
checkpoint, rounding it changes nothing, and scale * q + bias may be one operation with one rounding.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import njit

from engine.kernels.memory import float_at

SMALLEST_SCALE: Final = np.float32(2.0**-40)
SMALLEST_INPUT: Final = np.float32(2.0**-60)
LARGEST_SCALE: Final = np.float32(2.0**100)
TAME: Final = 64  # beside the shift of a matrix whose scales and biases are tame


def are_tame(values: npt.NDArray[Any]) -> bool:
    """Whether scales or biases are: zero, not finite, or large enough."""
    sizes = np.abs(values)
    return not bool(((sizes < SMALLEST_SCALE) & (sizes != 0)).any())


def are_short(values: npt.NDArray[Any], bits: int) -> bool:
    """Whether the product of every one of some scales with every whole number of `bits` bits is exact in float32.

    A significand of 24 bits that ends in as many zeros has room for the product, above and below where subnormal numbers begin.
    """
    words = values.view(np.uint32)
    return not bool((words & np.uint32((1 << bits) - 1)).any()) and bool((np.abs(values) <= LARGEST_SCALE).all())


@njit(nogil=True, error_model="numpy")
def is_tame(x, count):
    """Whether a row of inputs is."""
    small = 0
    for i in range(count):
        size = abs(float_at(x, i))
        small += (size < SMALLEST_INPUT) & (size != np.float32(0.0))
    return small == 0
