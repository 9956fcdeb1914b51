"""Rounding to bfloat16 without a framework.

Guarantees: to nearest, ties to even, in integer arithmetic alone, so the words are the same on every machine.
"""

import numpy as np
import numpy.typing as npt


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 values to bfloat16 words, to nearest, ties to even, in integer arithmetic."""
    bits = values.view(np.uint32)
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + lowest_kept) >> np.uint32(16)).astype(np.uint16)
