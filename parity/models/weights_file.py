"""A safetensors file whose tensors lie in a given order.

Guarantees: the bytes depend on the tensors, the order and the metadata alone. The digests that the default snapshots are
known by were first made by a writer that lays tensors out in the iteration order of a C++ hash table, which differs
between standard libraries; `tensor_order.toml` keeps that order, so that the same file comes out on every platform. For
files of no such history `parity.safetensors_file.dumps` is the writer.
"""

import json
import struct
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from parity.tensor import Tensor


def write_weights(path: Path, tensors: Mapping[str, Tensor], order: Sequence[str]) -> None:
    """Write `tensors` as one safetensors file: header sorted by name, data in `order`, metadata `format: mlx`.

    The file is streamed, not atomic: it belongs in a folder that appears as a whole.

    Raises:
        ValueError: `order` does not name every tensor once.
    """
    if sorted(order) != sorted(tensors):
        raise ValueError("the order must name every tensor once")
    spans: dict[str, tuple[int, int]] = {}
    offset = 0
    for name in order:
        spans[name] = (offset, offset + len(tensors[name].data))
        offset = spans[name][1]
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    for name in sorted(tensors):
        tensor = tensors[name]
        header[name] = {"data_offsets": spans[name], "dtype": tensor.dtype, "shape": tensor.shape}
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name].data)


def known_order(key: str | None, names: Sequence[str]) -> list[str]:
    """The order that `tensor_order.toml` keeps under `key`; sorted by name without a key.

    Raises:
        ValueError: The kept order is for another number of tensors.
    """
    ordered = sorted(names)
    if key is None:
        return ordered
    places: list[int] = tomllib.loads((files(__package__) / "tensor_order.toml").read_text("utf-8"))[key]
    if sorted(places) != list(range(len(ordered))):
        raise ValueError(f"the order {key!r} is for {len(places)} tensors, there are {len(ordered)}")
    return [ordered[place] for place in places]
