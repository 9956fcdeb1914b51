"""Arrays as the bytes that a safetensors file holds, and back, bit for bit.

Guarantees: no value passes through another floating dtype, so NaN payloads and the sign of zero survive; files with equal
tensors and metadata are equal bytes (the libraries' writers order several metadata keys at random). Reading is left to the
safetensors library, which refuses headers that are cut, overlap or leave gaps.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Final

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, deserialize

NAMES: Final[Mapping[str, mx.Dtype]] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
}
_WORDS: Final[Mapping[int, mx.Dtype]] = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def dtype_name(array: mx.array) -> str:
    """The safetensors name of an array's dtype.

    Raises:
        TypeError: There is none; no cache holds such an array.
    """
    for name, dtype in NAMES.items():
        if array.dtype == dtype:
            return name
    raise TypeError(f"no cache file holds arrays of {array.dtype}")


def to_bytes(array: mx.array) -> memoryview:
    """An array's elements in row-major order, little-endian."""
    words = np.array(mx.contiguous(array).view(_WORDS[array.dtype.size]))
    return memoryview(words.astype(words.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data)


def from_bytes(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """The array of such bytes.

    Raises:
        ValueError: The dtype is unknown, or the bytes are not as many as the shape says.
    """
    if dtype not in NAMES:
        raise ValueError(f"unknown dtype {dtype}")
    kind = NAMES[dtype]
    if len(data) != kind.size * math.prod(shape):
        raise ValueError(f"{len(data)} bytes for {dtype} of shape {list(shape)}")
    words = np.frombuffer(data, dtype=np.dtype(f"<u{kind.size}")).astype(f"u{kind.size}").reshape(shape)
    return mx.array(words).view(kind) if words.size else mx.zeros(shape, dtype=kind)


def encode(tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file: names sorted, compact JSON, header padded to 8 bytes."""
    names = sorted(tensors)
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        entries[name] = {
            "dtype": dtype_name(tensors[name]),
            "shape": tensors[name].shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        yield to_bytes(tensors[name])


def decode(file: bytes) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Tensors and metadata of a safetensors file, whoever wrote it.

    Raises:
        ValueError: It is cut short, its header is not a valid one, or holds a dtype that no cache has.
    """
    try:
        entries = deserialize(file)  # type: ignore[no-untyped-call]  # its stub omits the annotations
        header = json.loads(file[8 : 8 + struct.unpack("<Q", file[:8])[0]])
    except (SafetensorError, ValueError, struct.error) as error:
        raise ValueError(f"not a valid safetensors file: {error}") from error
    arrays = {name: from_bytes(entry["data"], entry["dtype"], tuple(entry["shape"])) for name, entry in entries}
    return arrays, header.get("__metadata__", {})
