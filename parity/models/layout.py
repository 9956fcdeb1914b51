"""What every snapshot folder must look like before anything in it is opened, whatever its source.

Guarantees: the files that an index sends a reader to are in the folder itself. It does not look into the weights; the
engine's checkpoint does.
"""

import json
from pathlib import Path
from typing import Final

from parity.errors import SnapshotError

INDEX: Final = "model.safetensors.index.json"


def check_layout(folder: Path, name: str) -> None:
    """Check the index of a snapshot in several files; one without an index passes.

    Raises:
        SnapshotError: The index is not one, leads out of the folder, or names a file that is not there.
    """
    index = folder / INDEX
    if not index.exists():
        return
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _refusal(name, reason=f"not JSON: {error}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    absent = [file for file in check_weight_map(weight_map, name=name) if not (folder / file).is_file()]
    if absent:
        raise SnapshotError(
            f"snapshot {name!r} lacks weights that its index names",
            absent=", ".join(absent),
            folder=folder,
            next_step=f"assay models fetch {name} --again, or copy the files there",
        )


def check_weight_map(weight_map: object, *, name: str) -> tuple[str, ...]:
    """Check the `weight_map` of an index: tensor name to the name of a safetensors file in the same folder.

    Args:
        weight_map: Parsed JSON.
        name: The snapshot's name, for the message.

    Returns:
        The files it names, each once, sorted.

    Raises:
        SnapshotError: It is no such table, or a value is anything but a plain file name.
    """
    if not isinstance(weight_map, dict) or not weight_map:
        raise _refusal(name, reason="it has no weight_map, or an empty one")
    for tensor, file in weight_map.items():
        if not _is_plain(file):
            raise _refusal(
                name,
                tensor=tensor,
                file=repr(file),
                reason="only safetensors files in the snapshot's own folder are read",
            )
    return tuple(sorted(set(weight_map.values())))


def _is_plain(file: object) -> bool:
    return (
        isinstance(file, str)
        and file.endswith(".safetensors")
        and not file.startswith(".")
        and not any(character in file for character in "/\\:\0")
    )


def _refusal(name: str, **facts: object) -> SnapshotError:
    return SnapshotError(
        f"the index of snapshot {name!r} is refused",
        index=INDEX,
        **facts,
        next_step="take the snapshot from a source that you trust",
    )
