"""Goldens that no case claims, and leftovers of writes that were killed.

Guarantees: only files of this platform below the folders of the given oracles are looked at. A golden of another version of the
oracle counts as unused once its case has one of this version, or has gone; until then it carries the history forward.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from oracles.registry import Oracle
from parity.case import Case
from parity.golden import golden_path
from parity.platform_key import platform_key


def find_unused(oracles: Iterable[Oracle], cases: Sequence[Case], root: Path) -> tuple[Path, ...]:
    """Manifests, and side files without a manifest, that no case claims.

    Args:
        oracles: Whose goldens are looked at.
        cases: All cases that exist, not only those just recorded.
        root: The goldens folder.
    """
    unused: list[Path] = []
    for oracle in oracles:
        claims = {case.name: case for case in cases if case.oracle == oracle.name}
        for folder in version_folders(oracle, root):
            for file in sorted([*folder.rglob("*.json"), *folder.rglob("*.safetensors")]):
                manifest = file.with_suffix(".json")
                if file != manifest and manifest.exists():
                    continue  # goes with its manifest
                case = claims.get(manifest.relative_to(folder).with_suffix("").as_posix())
                own = None if case is None else golden_path(case, version=oracle.version, root=root)
                if own is None or (manifest != own and own.exists()) or not manifest.exists():
                    unused.append(file)
    return tuple(unused)


def remove_unused(files: Iterable[Path], root: Path) -> None:
    """Remove goldens, the manifest first, and folders that become empty."""
    for file in files:
        file.unlink(missing_ok=True)
        file.with_suffix(".safetensors").unlink(missing_ok=True)
        for folder in file.parents:
            if folder == root or any(folder.iterdir()):
                break
            folder.rmdir()


def sweep_partial(oracles: Iterable[Oracle], root: Path) -> None:
    """Remove what killed writes left behind; the caller holds the recording lock."""
    for oracle in oracles:
        for folder in version_folders(oracle, root):
            for file in folder.rglob(".*.partial"):
                file.unlink(missing_ok=True)


def version_folders(oracle: Oracle, root: Path) -> list[Path]:
    """This platform's folder of every version of an oracle."""
    folders = (folder for folder in root.glob(f"{oracle.name}-*") if folder.name[len(oracle.name) + 1 :][:1].isdigit())
    return sorted(folder / platform_key() for folder in folders if (folder / platform_key()).is_dir())
