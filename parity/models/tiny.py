"""Tiny snapshots: weights drawn from a seed and the tensor's name, the same bytes on every machine.

Guarantees: no floating-point library function takes part. Each draw is a sum of twelve 16-bit integers out of PCG64's raw
words (a close approximation of a normal distribution that never leaves +-6), scaled by one float64 multiplication; square
root, division and the rounding to the stored dtype are exactly specified by IEEE 754. A tensor depends on its own name,
shape and seed alone, so adding or reordering tensors changes no other. It knows no model family: `tiny_shapes` does.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from parity import safetensors_file
from parity.atomic_file import write_atomically
from parity.models.bfloat16 import round_to_bfloat16
from parity.tensor import Tensor

DTYPE_NAMES: Final = {"bfloat16": "BF16", "float32": "F32"}
WORDS_PER_DRAW: Final = 3  # twelve 16-bit pieces
CENTRE: Final = 12 * 65535 // 2
UNIT: Final = 65536.0  # their standard deviation is sqrt(65536**2 - 1)
EMBEDDING_SPREAD: Final = 0.16
HEAD_GAIN: Final = 3.0  # spreads the logits, so that a greedy choice is seldom a near tie
VECTOR_SPREAD: Final = 0.1
BIAS_SPREAD: Final = 0.05


def build_tiny(shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0, dtype: str = "BF16") -> dict[str, Tensor]:
    """Draw every tensor of a tiny snapshot.

    Args:
        shapes: Tensor name to shape, vectors and matrices (rows are outputs).
        seed: Any integer; part of every tensor's own seed.
        dtype: Stored dtype, safetensors name, one of `DTYPE_NAMES`' values.

    Raises:
        ValueError: A dtype or a number of dimensions that no rule covers.
    """
    if dtype not in DTYPE_NAMES.values():
        raise ValueError(f"tiny snapshots are written as {' or '.join(DTYPE_NAMES.values())}, not {dtype!r}")
    return {name: _tensor(name, shape, seed, dtype) for name, shape in shapes.items()}


def write_tiny(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, seed: int, dtype: str
) -> None:
    """Write config.json and model.safetensors into `folder`, which is made if absent."""
    text = json.dumps(config, indent=1, sort_keys=True) + "\n"
    write_atomically(folder / "config.json", text.encode())
    write_atomically(folder / "model.safetensors", safetensors_file.dumps(build_tiny(shapes, seed=seed, dtype=dtype)))


def draw(seed: int, name: str, count: int) -> npt.NDArray[np.float64]:
    """Draw `count` values of mean 0 and standard deviation 1, each an exact multiple of 2**-16, shape (count,)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(count * WORDS_PER_DRAW)
    pieces = words.astype("<u8").view("<u2").reshape(count, 4 * WORDS_PER_DRAW)
    sums: npt.NDArray[np.int64] = pieces.sum(axis=1, dtype=np.int64)
    return (sums - CENTRE) / UNIT


def _tensor(name: str, shape: tuple[int, ...], seed: int, dtype: str) -> Tensor:
    mean, spread = _distribution(name, shape)
    values = (mean + spread * draw(seed, name, math.prod(shape)).reshape(shape)).astype(np.float32)
    return Tensor.of(round_to_bfloat16(values), "BF16") if dtype == "BF16" else Tensor.of(values)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation that keep activations near 1 and logits spread over a few units."""
    if len(shape) == 1:
        return (0.0, BIAS_SPREAD) if name.endswith(".bias") else (1.0, VECTOR_SPREAD)
    if len(shape) != 2:
        raise ValueError(f"no rule draws {name!r} of shape {list(shape)}")
    if name.endswith("embed_tokens.weight"):
        return 0.0, EMBEDDING_SPREAD
    gain = HEAD_GAIN if name == "lm_head.weight" else 1.0
    return 0.0, gain / math.sqrt(shape[1])
