"""Whether mlx's wheel rounds a product before it adds it.

The x86-64 wheel was built without fused multiply-adds: a product is rounded, then the sum. The aarch64 wheel has them wherever
a float32 product goes straight into a float32 sum: one rounding for both. Both were found by running the wheels.

Guarantees: nothing is taken on trust; this chooses which flavour is compiled, and `engine.kernels.verify` holds that one to mlx
before it is used. On any other machine it is wrong at worst, and the kernels are refused.
"""

import platform

CONTRACTING = ("aarch64", "arm64")


def contracts() -> bool:
    """Whether a float32 product and the sum that follows are rounded once."""
    return platform.machine().lower() in CONTRACTING
