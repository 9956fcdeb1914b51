"""Tiny snapshots: weights drawn from a seed and the tensor's name, the same bytes on every machine.

Guarantees: no floating-point library function takes part. Each draw is a sum of twelve 16-bit integers out of PCG64's raw
words (a close approximation of a normal distribution that never leaves +-6), scaled by one float64 multiplication; square
root, division and the rounding to the stored dtype are exactly specified by IEEE 754. A tensor depends on its own name,
shape and seed alone, so adding or reordering tensors changes no other. Which tensors there are it is told; what is known of
families is how a tensor of a given name should be spread.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from parity import safetensors_file
from parity.atomic_file import write_atomically
from parity.models.bfloat16 import round_to_bfloat16
from parity.models.weight_format import FORMATS, WeightFormat, packed
from parity.tensor import Tensor

DTYPE_NAMES: Final = {"bfloat16": "BF16", "float32": "F32"}
WORDS_PER_DRAW: Final = 3  # twelve 16-bit pieces
CENTRE: Final = 12 * 65535 // 2
UNIT: Final = 65536.0  # their standard deviation is sqrt(65536**2 - 1)
EMBEDDING_SPREAD: Final = 0.16
HEAD_GAIN: Final = 3.0  # spreads the logits, so that a greedy choice is seldom a near tie
CLIPPED_GAIN: Final = 4.0  # so that some of what goes into an activation that clips at 7 is clipped
VECTOR_SPREAD: Final = 0.1
BIAS_SPREAD: Final = 0.05
ONE_PLUS: Final = frozenset({"gemma", "gemma2", "gemma3_text"})  # their norms store w and multiply by 1 + w
LEAVES: Final[Mapping[str, tuple[float, float]]] = {  # mean and spread of vectors by the last word of their name
    "A_log": (1.4, 0.5),
    "D": (1.0, 0.1),
    "bias": (0.0, BIAS_SPREAD),
    "dt_bias": (-1.0, 0.4),
    "e_score_correction_bias": (0.0, BIAS_SPREAD),
    "layer_scalar": (1.0, 0.05),
    "sinks": (0.0, 1.0),
}
MIXED: Final = (  # formats that take turns over the packable modules; None leaves one as drawn
    WeightFormat(mode="affine", bits=8, group_size=32),
    WeightFormat(mode="affine", bits=4, group_size=64),
    WeightFormat(mode="affine", bits=3, group_size=32),
    None,
    WeightFormat(mode="affine", bits=6, group_size=64),
    WeightFormat(mode="affine", bits=2, group_size=32),
    WeightFormat(mode="affine", bits=5, group_size=32),
)


def build_tiny(
    shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0, dtype: str = "BF16", model_type: str = ""
) -> dict[str, Tensor]:
    """Draw every tensor of a tiny snapshot.

    Args:
        shapes: Tensor name to shape; the rows of a matrix are outputs.
        seed: Any integer; part of every tensor's own seed.
        dtype: Stored dtype, safetensors name, one of `DTYPE_NAMES`' values.
        model_type: Decides how norms are spread.

    Raises:
        ValueError: A dtype that no rule covers.
    """
    if dtype not in DTYPE_NAMES.values():
        raise ValueError(f"tiny snapshots are written as {' or '.join(DTYPE_NAMES.values())}, not {dtype!r}")
    return {name: _tensor(name, shape, seed, dtype, model_type) for name, shape in shapes.items()}


def pack_tiny(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], packable: Sequence[str], form: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Pack the weights of a drawn snapshot.

    Args:
        config: config.json without quantization.
        tensors: Drawn tensors.
        packable: Module paths whose `weight` may be packed; one whose rows the group does not divide stays as drawn.
        form: A key of `FORMATS`, or `mixed`: another format for each module in turn, some left as drawn.

    Returns:
        The config with its `quantization` entry, and the tensors with scales (and biases) beside the packed weights.
    """
    default = FORMATS["q4g64"] if form == "mixed" else FORMATS[form]
    entry: dict[str, Any] = default.entry()
    out = dict(tensors)
    for i, path in enumerate(packable):
        own = MIXED[i % len(MIXED)] if form == "mixed" else default
        weight = tensors[f"{path}.weight"]
        if own is None or weight.shape[-1] % max(own.group_size, 32):
            entry |= {path: False} if form == "mixed" else {}
            continue
        if own != default:
            entry[path] = own.entry()
        values = weight.values().astype(np.float32)
        out |= {f"{path}.{leaf}": tensor for leaf, tensor in packed(values, own).items()}
    return {**config, "quantization": entry}, out


def write_tiny(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, seed: int, dtype: str
) -> None:
    """Draw a snapshot and write it into `folder`."""
    model_type = str(config.get("model_type", ""))
    write_snapshot(folder, config, build_tiny(shapes, seed=seed, dtype=dtype, model_type=model_type))


def write_snapshot(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into `folder`, which is made if absent."""
    text = json.dumps(config, indent=1, sort_keys=True) + "\n"
    write_atomically(folder / "config.json", text.encode())
    write_atomically(folder / "model.safetensors", safetensors_file.dumps(tensors))


def draw(seed: int, name: str, count: int) -> npt.NDArray[np.float64]:
    """Draw `count` values of mean 0 and standard deviation 1, each an exact multiple of 2**-16, shape (count,)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(count * WORDS_PER_DRAW)
    pieces = words.astype("<u8").view("<u2").reshape(count, 4 * WORDS_PER_DRAW)
    sums: npt.NDArray[np.int64] = pieces.sum(axis=1, dtype=np.int64)
    return (sums - CENTRE) / UNIT


def _tensor(name: str, shape: tuple[int, ...], seed: int, dtype: str, model_type: str) -> Tensor:
    mean, spread = _distribution(name, shape, model_type)
    values = (mean + spread * draw(seed, name, math.prod(shape)).reshape(shape)).astype(np.float32)
    return Tensor.of(round_to_bfloat16(values), "BF16") if dtype == "BF16" else Tensor.of(values)


def _distribution(name: str, shape: tuple[int, ...], model_type: str) -> tuple[float, float]:
    """Mean and standard deviation that keep activations near 1 and logits spread over a few units."""
    leaf = name.rpartition(".")[2]
    if leaf in LEAVES:
        return LEAVES[leaf]
    if len(shape) <= 1:
        return (0.0 if leaf == "weight" and model_type in ONE_PLUS else 1.0), VECTOR_SPREAD
    if re.search(r"(^|\.)(embed_tokens|embed_tokens_per_layer|embeddings)\.weight$", name):
        return 0.0, EMBEDDING_SPREAD
    fan_in = math.prod(shape[1:]) if "conv" in name else shape[-1]
    gain = HEAD_GAIN if name.endswith("lm_head.weight") else 1.0
    if model_type == "gpt_oss" and re.search(r"\.experts\.(gate|up)_proj\.weight$", name):
        gain = CLIPPED_GAIN
    return 0.0, gain / math.sqrt(fan_in)
