"""Whose cache a file holds: digests of the model's parts, so that a cache is never continued on another model.

Guarantees: a fingerprint depends on content alone, not on names, paths or times. Keys and values follow from every weight, so
the weights are part of it: two fine-tunes of one architecture share config and tokenizer, and not a single key.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from engine.config import load_json

TOKENIZER: Final = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """What must agree between the model that filled a cache and the one that continues it; empty means not known.

    Attributes:
        config: SHA-256 of config.json as compact JSON with sorted keys, in hex.
        tokenizer: SHA-256 of tokenizer.json.
        weights: SHA-256 over the weight files' names and contents.
        dtype: What the model computes in, such as `f32`.
        namespace: Names what else went into the keys, such as adapters; free text.
    """

    config: str = ""
    tokenizer: str = ""
    weights: str = ""
    dtype: str = ""
    namespace: str = ""

    @classmethod
    def of(cls, folder: Path, *, dtype: str, namespace: str = "") -> Self:
        """Those of a snapshot; reads all of its weights once.

        Args:
            folder: The snapshot.
            dtype: What the model computes in.
            namespace: As above.

        Raises:
            ConfigError: config.json is missing or malformed.
        """
        config = json.dumps(load_json(folder / "config.json"), sort_keys=True, separators=(",", ":"))
        weights = hashlib.sha256()
        for file in sorted(folder.glob("*.safetensors")):
            weights.update(file.name.encode() + b"\0" + _digest(file).encode())
        tokenizer = folder / TOKENIZER
        return cls(
            config=hashlib.sha256(config.encode()).hexdigest(),
            tokenizer=_digest(tokenizer) if tokenizer.is_file() else "",
            weights=weights.hexdigest(),
            dtype=dtype,
            namespace=namespace,
        )

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        """Those that a file holds.

        Raises:
            ValueError: A name is missing or unknown, or a value is no text.
        """
        names = {field.name for field in fields(cls)}
        if set(raw) != names or not all(isinstance(value, str) for value in raw.values()):
            raise ValueError(f"fingerprints {sorted(raw)} instead of {sorted(names)}")
        return cls(**raw)

    def differing(self, other: Self) -> tuple[str, ...]:
        """Names of the parts that both know and that are not the same; the namespace must always be the same."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return tuple(name for name, (a, b) in pairs.items() if a != b and (name == "namespace" or (a and b)))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
