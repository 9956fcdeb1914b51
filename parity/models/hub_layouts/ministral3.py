"""ministral3: on the hub the projections of the layers may be stored beside a scale each.

The oracle multiplies `weight` by the scalar `weight_scale_inv` and drops `activation_scale`. Here each weight is divided by
a power of two, which is exact in bfloat16, and that power stands beside it: undone, the drawn bits come back.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from parity.tensor import Tensor

MANTISSA: Final = 7  # bits of a bfloat16 below its exponent
ONE: Final = 127 << MANTISSA  # 1.0
POWERS: Final = 4  # scales of 1/2, 1/4, 1/8 and 1/16 take turns


def to_hub(_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put a scale beside every projection of a layer, and an activation scale that nobody reads."""
    out = dict(tensors)
    scaled = sorted(name for name in tensors if name.endswith("_proj.weight"))
    for i, name in enumerate(scaled):
        power = 1 + i % POWERS
        words = tensors[name].bits().astype("<u2")
        out[name] = Tensor.of(np.where(words & 0x7FFF, words + (power << MANTISSA), words).astype("<u2"), "BF16")
        out[f"{name}_scale_inv"] = _scalar(ONE - (power << MANTISSA))
        out[f"{name.removesuffix('weight')}activation_scale"] = _scalar(ONE + i)
    return out


def _scalar(word: int) -> Tensor:
    return Tensor.of(np.array(word, dtype="<u2"), "BF16")
