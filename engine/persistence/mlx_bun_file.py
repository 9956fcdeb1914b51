"""mlx-bun's third cache format, read only and by structure: caches, tokens and what the header says about the model.

Layout: `MLXBUNKV2` and a line feed, header length (u32), data start (u32), header hash (u64), JSON header, zeros up to the data
start, tensors at multiples of 16,384 from there; all little-endian.

Guarantees: kinds `kv`, `rotating`, `qkv` and `ssm` become caches that continue where those stood; entries that no family here
has are refused by name. The hashes are of a function (Bun's wyhash) that is not computed here and are NOT checked: sizes,
places and shapes are. Nothing is ever written in this format.
Source: spec/kv.md section 12.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, PackedHeads, grown
from engine.cache.quantized import QuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.persistence.refusal import CacheFileError, damaged, read_file
from engine.persistence.tensor_bytes import from_bytes

MAGIC: Final = b"MLXBUNKV2\n"
VERSION: Final = 3
PAGE: Final = 16384
HEAD: Final = struct.Struct("<IIQ")
# The numbers of mlx's C interface, in which the engine counts its dtypes. F64 came in before BF16 at some time and shifted it;
# no cache holds F64, and the sizes are checked, so both of its numbers are read.
DTYPES: Final = ("BOOL", "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F16", "F32", "BF16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BunCaches:
    """What a file of mlx-bun holds.

    Attributes:
        caches: One an entry.
        tokens: Those in the caches.
        model: `modelId`, `configFingerprint`, `tokenizerHash` and `ns`, as far as the file has them.
    """

    caches: tuple[Cache, ...]
    tokens: tuple[int, ...]
    model: Mapping[str, str]


def load_mlx_bun(path: Path, *, num_caches: int | None = None) -> BunCaches:
    """Read a file of mlx-bun's third format.

    Args:
        path: The file.
        num_caches: How many the model makes.

    Raises:
        CacheFileError: The file is missing, cut short, of another version, of another model, or holds a kind without an
            equal here.
    """
    data = read_file(path)
    if not data.startswith(MAGIC):
        raise CacheFileError(
            "not a cache file of mlx-bun",
            file=path.name,
            begins=repr(data[: len(MAGIC)].decode("ascii", "replace")),
            known=repr(MAGIC.decode()),
            next_step="read own files with engine.persistence.cache_file",
        )
    try:
        header, start = _header(data)
        if header.get("formatVersion") != VERSION:
            raise _other_version(path, header.get("formatVersion"))
        entries = header["caches"]
        if num_caches is not None and len(entries) != num_caches:
            raise _other_model(path, num_caches, len(entries))
        caches = tuple(_cache(path, entry, data, start) for entry in entries)
        tokens = tuple(map(int, header["tokens"]))
        if wrong := [cache.offset for cache in caches if cache.offset != len(tokens)]:
            raise ValueError(f"{len(tokens)} tokens, but a cache has seen {wrong[0]}")  # noqa: TRY301
    except (struct.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise damaged(path, str(error)) from error
    names = ("modelId", "configFingerprint", "tokenizerHash", "ns")
    return BunCaches(caches=caches, tokens=tokens, model={name: str(header[name]) for name in names if name in header})


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The JSON header, and where the tensors start."""
    length, start, _hash = HEAD.unpack_from(data, len(MAGIC))
    first = len(MAGIC) + HEAD.size
    if start % PAGE or first + length > start or start > len(data):
        raise ValueError(f"a header of {length} bytes before data at {start} in a file of {len(data)}")
    header: dict[str, Any] = json.loads(data[first : first + length])
    return header, start


def _tensors(entry: Mapping[str, Any], data: bytes, start: int) -> list[mx.array]:
    made = []
    for tensor in entry["tensors"]:
        at, size, number = start + int(tensor["off"]), int(tensor["bytes"]), int(tensor["dtype"])
        if tensor["off"] % PAGE or tensor["off"] < 0 or at + size > len(data):
            raise ValueError(f"a tensor of {size} bytes at {tensor['off']} does not lie in the file")
        if not 0 <= number < len(DTYPES):
            raise ValueError(f"dtype number {number}")
        made.append(from_bytes(data[at : at + size], DTYPES[number], tuple(map(int, tensor["shape"]))))
    return made


def _cache(path: Path, entry: Mapping[str, Any], data: bytes, start: int) -> Cache:
    kind, offset, tensors = entry["kind"], int(entry["offset"]), _tensors(entry, data, start)
    if kind not in _COUNTS:
        raise CacheFileError(
            "the file holds a kind of cache that has no equal here",
            file=path.name,
            kind=kind,
            known=", ".join(_COUNTS),
            next_step="prefill the prompt again",
        )
    if len(tensors) != _COUNTS[kind]:
        raise ValueError(f"{len(tensors)} tensors in an entry of kind {kind}")
    if kind == "ssm":
        return RecurrentCache(state=tuple(tensors), offset=offset)
    if any(tensor.ndim != 4 for tensor in tensors):
        raise ValueError(f"tensors of kind {kind} have the shapes {[list(t.shape) for t in tensors]}")
    if kind == "rotating":
        return _rotating(entry, offset, tensors)
    if any(tensor.shape[2] != offset for tensor in tensors):
        raise ValueError(f"{tensors[0].shape[2]} positions in an entry that has seen {offset}")
    if kind == "kv":
        return PlainCache(keys=grown(None, 0, tensors[0]), values=grown(None, 0, tensors[1]), offset=offset)
    keys, values = (_packed(tensors[i : i + 3], int(entry["bits"]), int(entry["groupSize"])) for i in (0, 3))
    return QuantizedCache(keys=keys, values=values, offset=offset)


def _rotating(entry: Mapping[str, Any], offset: int, tensors: list[mx.array]) -> RotatingCache:
    index, max_size = int(entry["idx"]), int(entry["maxSize"])
    if not 0 <= index <= tensors[0].shape[2]:
        raise ValueError(f"a ring of {tensors[0].shape[2]} positions is written at {index}")
    return RotatingCache(max_size=max_size, keys=tensors[0], values=tensors[1], offset=offset, index=index)


def _packed(tensors: list[mx.array], bits: int, group_size: int) -> PackedHeads:
    weight, scales, biases = tensors
    if weight.shape[-1] * 32 != scales.shape[-1] * group_size * bits or scales.shape != biases.shape:
        raise ValueError(
            f"words {list(weight.shape)}, scales {list(scales.shape)}, {bits} bits, groups of {group_size}"
        )
    weight, scales, biases = (grown(None, 0, tensor) for tensor in tensors)
    return PackedHeads(weight=weight, scales=scales, biases=biases, bits=bits, group_size=group_size)


_COUNTS: Final = {"kv": 2, "rotating": 2, "qkv": 6, "ssm": 2}


def _other_version(path: Path, found: object) -> CacheFileError:
    return CacheFileError(
        "a cache file of mlx-bun in another version",
        file=path.name,
        version=found,
        known=VERSION,
        next_step="save it again with mlx-bun 0.2 to 0.4",
    )


def _other_model(path: Path, expected: int, found: int) -> CacheFileError:
    return CacheFileError(
        "the cache file belongs to another model",
        file=path.name,
        caches=f"expected {expected}, found {found}",
        next_step="load it on the model that saved it, or prefill the prompt again",
    )
