"""The oracles that are known: name, exact pins, entry module, and what each is believed for.

Guarantees: `registry.toml` is the only place where an oracle's version is written; a table with a missing or unknown key is
refused. It knows nothing about environments or processes.
"""

import difflib
import hashlib
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from parity.errors import OracleError, UsageError

REPOSITORY: Final = Path(__file__).resolve().parent.parent
REGISTRY: Final = Path(__file__).with_name("registry.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """One oracle.

    Attributes:
        name: What cases call it.
        version: Version of the distribution that gives it its name; part of every golden's path.
        entry: Module run as `python -m ENTRY REQUEST.json` inside its environment.
        lock: File with every distribution of the environment and its hashes.
        pins: Distribution to version on this platform; bits depend on these.
        believed_for: What its goldens prove.
        from_source: Distributions that have no wheel, each with the CMake arguments of its build.
        on_demand: Nothing builds its environment unless it is named; so is every oracle that is built from source.
    """

    name: str
    version: str
    entry: str
    lock: Path
    pins: Mapping[str, str]
    believed_for: str
    from_source: Mapping[str, str] = field(default_factory=dict)
    on_demand: bool = False

    @property
    def lock_digest(self) -> str:
        """SHA-256 of the lock file's bytes, in hex."""
        return hashlib.sha256(self.lock.read_bytes()).hexdigest()

    @property
    def source_digest(self) -> str:
        """SHA-256 over the sources that can take part in turning a case into a trace."""
        digest = hashlib.sha256()
        for file in sorted([*(REPOSITORY / "oracles").rglob("*.py"), *(REPOSITORY / "parity").glob("*.py")]):
            digest.update(file.relative_to(REPOSITORY).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
        return digest.hexdigest()

    @classmethod
    def from_toml(cls, name: str, raw: Mapping[str, Any], folder: Path) -> Self:
        """Read one table of the registry.

        Raises:
            OracleError: A key is missing, unknown or of the wrong kind.
        """
        wanted = {"version", "entry", "lock", "pins", "believed_for"}
        from_source = raw.get("from_source", {})
        if (
            set(raw) - {"from_source", "on_demand"} != wanted
            or not isinstance(from_source, dict)
            or not isinstance(raw.get("on_demand", False), bool)
            or not isinstance(raw["pins"], dict)
            or "all" not in raw["pins"]
        ):
            raise OracleError(
                f"oracle {name!r} is not described as an oracle must be",
                keys=", ".join(sorted(raw)) or "none",
                wanted=", ".join(sorted(wanted)) + " (pins with a table `all`)",
                next_step="correct oracles/registry.toml",
            )
        return cls(
            name=name,
            version=raw["version"],
            entry=raw["entry"],
            lock=folder / raw["lock"],
            pins={**raw["pins"]["all"], **raw["pins"].get(sys.platform, {})},
            believed_for=raw["believed_for"],
            from_source=from_source,
            on_demand=bool(from_source) or raw.get("on_demand", False),
        )


def load_oracles(registry: Path = REGISTRY, *, on_demand: bool = False) -> dict[str, Oracle]:
    """The oracles by name, in the registry's order.

    Args:
        registry: The table.
        on_demand: Also those that are built only where they are named.
    """
    tables = tomllib.loads(registry.read_text(encoding="utf-8"))
    oracles = {name: Oracle.from_toml(name, raw, registry.parent) for name, raw in tables.items()}
    return {name: oracle for name, oracle in oracles.items() if on_demand or not oracle.on_demand}


def find_oracle(name: str, registry: Path = REGISTRY) -> Oracle:
    """The oracle of that name.

    Raises:
        UsageError: There is none; the message lists the near names.
    """
    oracles = load_oracles(registry, on_demand=True)
    if name not in oracles:
        near = difflib.get_close_matches(name, oracles, n=3, cutoff=0.4) or list(oracles)
        raise UsageError(f"unknown oracle {name!r}", near=", ".join(near), next_step="assay oracles list")
    return oracles[name]
