"""A trace: what one run produced, and the runner protocol that engines and oracles share.

Guarantees: tensors keep execution order; a trace survives a round trip through its folder bit for bit. A trace holds no
opinion: judging one is another module's work and another step.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from parity import safetensors_file
from parity.atomic_file import write_atomically
from parity.case import Case
from parity.errors import AssayError
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.tensor import Tensor

TOKEN_IDS = "token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a run produced.

    Attributes:
        tensors: In execution order: `activations/<step>/<module path>` where recorded, `logits/<step>` of shape [B, V] in
            the dtype the model computed, and last `token_ids` (I32, [num_steps]): the id that follows each row.
            An activation is the module's output at the last position, in its own dtype. Of several outputs it is the first,
            whatever that is: of a router the chosen ids (U32), not their weights. A module that puts out nothing, as an
            indexer that need not choose, has no activation at that step.
        cache: One word a layer that owns a cache, as it stood after the run: `plain`, `quantized-b8-g64`.
    """

    tensors: Mapping[str, Tensor]
    cache: tuple[str, ...] = field(default=())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The id that follows each row of logits."""
        return tuple(int(i) for i in self.tensors[TOKEN_IDS].values())

    def logits(self, step: int) -> Tensor:
        """Row `step` of logits, shape [B, V]."""
        return self.tensors[logits_name(step)]

    def save(self, folder: Path) -> None:
        """Write `trace.safetensors`, then `trace.json`; a folder with the JSON in it is complete."""
        write_atomically(folder / "trace.safetensors", safetensors_file.dumps(self.tensors))
        described = {"order": list(self.tensors), "cache": list(self.cache)}
        write_atomically(folder / "trace.json", json.dumps(described, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            AssayError: A file is missing or was not written by `save`.
        """
        try:
            described = json.loads((folder / "trace.json").read_text())
            tensors = safetensors_file.loads((folder / "trace.safetensors").read_bytes())
            return cls(tensors={name: tensors[name] for name in described["order"]}, cache=tuple(described["cache"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AssayError(
                "not a trace",
                folder=folder,
                reason=error,
                next_step="name a folder with trace.json and trace.safetensors",
            ) from error


class Runner(Protocol):
    """Whatever turns a case into a trace: the engine, an oracle, a foreign engine."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        """Run one case."""
        ...

    def provenance(self) -> Provenance:
        """What the bits of its traces rest on."""
        ...


def logits_name(step: int) -> str:
    """Name of row `step` of logits in a trace."""
    return f"logits/{step}"


def activation_name(step: int, module_path: str) -> str:
    """Name of a module's output at `step` in a trace."""
    return f"activations/{step}/{module_path}"
