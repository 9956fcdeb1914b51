"""Safetensors files whose bytes depend on the tensors alone.

Guarantees: equal tensors give equal files, whatever the order of insertion, the library version or the process; reading
accepts any valid file and refuses one whose header is too large, overlaps or leaves gaps (the safetensors library checks).
The writer is ours because goldens are committed: the library's writers order several metadata keys at random, and its
interface to raw bytes changes between versions. Source: the format section of the safetensors documentation (8-byte
length, JSON header, one buffer).
"""

import json
import struct
from collections.abc import Mapping

from safetensors import SafetensorError, deserialize

from parity.tensor import Tensor


def dumps(tensors: Mapping[str, Tensor]) -> bytes:
    """Canonical file: names sorted, compact JSON, header padded to 8 bytes, no metadata."""
    header: dict[str, object] = {}
    offset = 0
    names = sorted(tensors)
    for name in names:
        tensor = tensors[name]
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors[name].data for name in names)


def loads(file: bytes) -> dict[str, Tensor]:
    """Tensors of a safetensors file, whoever wrote it.

    Raises:
        ValueError: The file is truncated, or its header is not a valid one.
    """
    try:
        entries = deserialize(file)  # type: ignore[no-untyped-call]  # its stub omits the annotations
    except SafetensorError as error:
        raise ValueError(f"not a valid safetensors file: {error}") from error
    return {
        name: Tensor(dtype=entry["dtype"], shape=tuple(entry["shape"]), data=bytes(entry["data"]))
        for name, entry in entries
    }
