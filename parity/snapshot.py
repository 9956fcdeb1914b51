"""A snapshot: a model folder as on the hub, with the digest of every file in it.

Guarantees: `files` was hashed from the bytes on disk in this call. It does not look inside the weights; the engine's
checkpoint does, with every tensor accounted for.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from parity.errors import SnapshotError


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A model folder.

    Attributes:
        name: Name in the catalogue, or the folder's own.
        path: The folder.
        repo_id: Where it came from, if from the hub.
        revision: Its commit there.
        files: File name to SHA-256, sorted by name.
        config: Parsed config.json.
        quantization: The `quantization` entry of the config, if any.
    """

    name: str
    path: Path
    repo_id: str | None = None
    revision: str | None = None
    files: Mapping[str, str]
    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None = field(default=None)

    @classmethod
    def read(
        cls, path: Path, *, name: str | None = None, repo_id: str | None = None, revision: str | None = None
    ) -> Self:
        """Hash a folder and parse its config.

        Raises:
            SnapshotError: The folder, its config.json or its weights are missing, or the config is not a JSON object.
        """
        name = name or path.name
        if not path.is_dir():
            raise SnapshotError(f"no snapshot {name!r}", looked_at=path, next_step=f"assay models fetch {name}")
        config = _read_config(path, name)
        files = {file.name: sha256_file(file) for file in sorted(path.iterdir()) if _counts(file)}
        if not any(file.endswith(".safetensors") for file in files):
            raise SnapshotError(
                f"snapshot {name!r} has no weights",
                looked_at=path / "*.safetensors",
                next_step=f"assay models fetch {name} --again",
            )
        return cls(
            name=name,
            path=path,
            repo_id=repo_id,
            revision=revision,
            files=files,
            config=config,
            quantization=config.get("quantization"),
        )

    @property
    def logit_files(self) -> dict[str, str]:
        """The files that logits depend on, with their digests: the config and the weights."""
        return {
            n: d for n, d in self.files.items() if n == "config.json" or n.endswith((".safetensors", ".index.json"))
        }


NO_MODEL: Final = Snapshot(name="no-model", path=Path(), files={}, config={})  # of cases that need none


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_config(path: Path, name: str) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = "it does not exist"
    except ValueError as error:
        reason = f"not JSON: {error}"
    else:
        if isinstance(config, dict):
            return config
        reason = f"a JSON {type(config).__name__} where an object belongs"
    raise SnapshotError(
        f"snapshot {name!r} has no usable config.json",
        file=file,
        reason=reason,
        next_step=f"assay models fetch {name} --again, or mend the file",
    )


def _counts(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".")
