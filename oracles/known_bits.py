"""What a committed golden says about its bits, and whether new bits may take their place.

The manifest is read on its own, without the side file: a kill between the two writes of a golden leaves an old manifest beside
a new side file, and the manifest is still the authority on what was recorded.

Guarantees: bits that a manifest lists are replaced only when a pinned version changed or a reason is given; either is written
into the history. An unreadable manifest is replaced only with a reason.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from oracles.registry import Oracle
from oracles.unused import version_folders
from parity.case import Case
from parity.errors import GoldenError
from parity.golden import FORMAT, GOLDENS, Recording, golden_path
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBits:
    """What one manifest lists.

    Attributes:
        case: As `Case.to_json` gave it.
        snapshot_files: File name to SHA-256.
        digests: Tensor name to SHA-256, in execution order.
        packages: Distribution to version.
        wheels: Distribution to digest of its files.
        history: Oldest first.
    """

    case: Mapping[str, Any]
    snapshot_files: Mapping[str, str]
    digests: Mapping[str, str]
    packages: Mapping[str, str]
    wheels: Mapping[str, str]
    history: tuple[Recording, ...]

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Read a manifest; None where there is none.

        Raises:
            ValueError: It is there and cannot be read.
        """
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(str(error)) from error
        try:
            if raw["format"] != FORMAT:
                raise ValueError(f"format {raw['format']!r}")
            return cls(
                case=dict(raw["case"]),
                snapshot_files=dict(raw["snapshot_files"]),
                digests={name: digest for name, _dtype, _shape, digest in raw["entries"]},
                packages=dict(raw["provenance"]["packages"]),
                wheels=dict(raw["provenance"]["digests"]),
                history=tuple(Recording(**entry) for entry in raw["history"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def find_known(case: Case, oracle: Oracle, root: Path = GOLDENS) -> tuple[Path, KnownBits | None]:
    """The manifest that a new recording of a case must answer to: this version's, else the nearest older or newer one's.

    Returns:
        The file, and what it lists; the file is this version's where no version has the case.

    Raises:
        ValueError: The manifest cannot be read.
    """
    own = golden_path(case, version=oracle.version, root=root)
    others = sorted(version_folders(oracle, root), key=lambda folder: _version(folder.parent.name), reverse=True)
    for file in [own, *(folder / f"{case.name}.json" for folder in others)]:
        if (known := KnownBits.read(file)) is not None:
            return file, known
    return own, None


def history_of(
    case: Case,
    trace: Trace,
    *,
    oracle: Oracle,
    provenance: Provenance,
    snapshot: Snapshot,
    root: Path = GOLDENS,
    reason: str | None = None,
) -> tuple[Recording, ...]:
    """The history that a new golden carries; unchanged bits from unchanged pins keep the history they have.

    Raises:
        GoldenError: The bits would change and nothing explains it, or the manifest cannot be read and no reason is given.
    """
    mlx = provenance.packages.get("mlx", "?")
    bits = bits_digest({name: tensor.digest for name, tensor in trace.tensors.items()})

    def entry(why: str) -> Recording:
        return Recording(oracle=f"{oracle.name} {oracle.version}", mlx=mlx, bits=bits, reason=why)

    try:
        file, known = find_known(case, oracle, root)
    except ValueError as error:
        if reason is None:
            raise _unreadable(case, str(error)) from error
        return (entry(f"{reason} (the manifest before could not be read)"),)
    if known is None:
        return (entry(reason or "first recording"),)
    pins = _changed_pins(known, oracle, provenance)
    changed = _first_changed(known, trace)
    if changed is None and not pins:
        last = known.history[-1] if known.history else None
        if last is not None and last.bits == bits:
            return known.history
        return (*known.history, entry(reason or "the case asks for more; every tensor from before is unchanged"))
    why = [f"pinned version changed: {pins}"] if pins else []
    why += [reason] if reason else []
    if not why:
        raise _refused(case, known, trace, changed or "", provenance=provenance, snapshot=snapshot, file=file)
    return (*known.history, entry("; ".join(why) + ("" if changed else "; bits unchanged")))


def bits_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 over names and digests of a trace's tensors in order: one number for all bits of a recording."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests.items()).encode()).hexdigest()


def _first_changed(known: KnownBits, trace: Trace) -> str | None:
    """First tensor of the manifest that the trace lacks or has with other bits."""
    for name, digest in known.digests.items():
        if name not in trace.tensors or trace.tensors[name].digest != digest:
            return name
    return None


def _changed_pins(known: KnownBits, oracle: Oracle, provenance: Provenance) -> str:
    """What changed among the pinned versions, in words; empty when nothing did."""
    pairs = ((name, known.packages.get(name), provenance.packages.get(name)) for name in oracle.pins)
    return ", ".join(f"{name} {old or 'none'} to {new or 'none'}" for name, old, new in pairs if old != new)


def _refused(
    case: Case,
    known: KnownBits,
    trace: Trace,
    changed: str,
    *,
    provenance: Provenance,
    snapshot: Snapshot,
    file: Path,
) -> GoldenError:
    found = trace.tensors[changed].digest if changed in trace.tensors else "absent"
    return GoldenError(
        f"the golden of {case.name} would change, and nothing explains it",
        first_changed=changed,
        committed=known.digests[changed],
        recorded=found,
        also_changed=", ".join(_also_changed(case, known, provenance, snapshot))
        or "nothing: case, weights and packages are the same",
        golden=f"{file.name} is kept as it is",
        next_step=f"find out why; if it is meant: assay record '{case.name}' --reason '...'",
    )


def _also_changed(case: Case, known: KnownBits, provenance: Provenance, snapshot: Snapshot) -> list[str]:
    """Candidates for the cause: what else differs from the manifest."""
    new = json.loads(json.dumps(case.to_json()))
    found = [f"case field {name}" for name in sorted({*new, *known.case}) if new.get(name) != known.case.get(name)]
    files = snapshot.logit_files
    names = sorted({*files, *known.snapshot_files})
    found += [f"snapshot file {name}" for name in names if files.get(name) != known.snapshot_files.get(name)]
    wheels = sorted({*known.wheels, *provenance.digests})
    found += [f"files of package {name}" for name in wheels if provenance.digests.get(name) != known.wheels.get(name)]
    return found


def _unreadable(case: Case, reason: str) -> GoldenError:
    return GoldenError(
        f"the manifest of {case.name} cannot be read, so it is not known which bits it held",
        reason=reason,
        next_step=f"git checkout -- 'goldens/**/{case.name.rsplit('/', 1)[-1]}.json', or record with --reason '...'",
    )


def _version(folder: str) -> tuple[int, ...]:
    """Numbers of a folder name such as `mlx-lm-0.32.2`, for ordering."""
    return tuple(int(part) for part in folder.rsplit("-", 1)[-1].split(".") if part.isdigit())
