"""What goldens lie on disk: whose, of which version, and whether any case claims them.

Guarantees: nothing is guessed and nothing is passed over: two versions side by side are an error, and a golden that no case
claims is a failing verdict. Contents are not read here.
"""

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from parity.errors import GoldenError
from parity.verdict import Status, Verdict


def golden_version(oracle: str, root: Path, platform: str) -> str | None:
    """Version of the one oracle whose goldens this platform has; None where it has none.

    Raises:
        GoldenError: It has those of several versions; which of them counts is not guessed.
    """
    name = re.compile(re.escape(oracle) + r"-(\d.*)")
    folders = sorted(root.glob(f"{oracle}-*")) if root.is_dir() else []
    found = [m[1] for f in folders if (m := name.fullmatch(f.name)) and any((f / platform).rglob("*.json"))]
    if len(found) > 1:
        raise GoldenError(
            f"goldens of several versions of {oracle} lie side by side for {platform}",
            versions=", ".join(found),
            next_step="git rm the folders that oracles/registry.toml does not pin",
        )
    return found[0] if found else None


def unused_goldens(
    versions: dict[str, str], every_name: Collection[str], *, pattern: str | None, root: Path, platform: str
) -> tuple[Verdict, ...]:
    """A failing verdict for every golden on disk that no case claims, side files without a manifest included."""
    verdicts = []
    for oracle, version in versions.items():
        folder = root / f"{oracle}-{version}" / platform
        files = [f for f in folder.rglob("*") if f.suffix in (".json", ".safetensors") and not f.name.startswith(".")]
        names = sorted({f.relative_to(folder).with_suffix("").as_posix() for f in files})
        for name in names:
            if name in every_name or not (pattern is None or name == pattern or fnmatchcase(name, pattern)):
                continue
            unused = Verdict(
                name=name,
                status=Status.STALE_GOLDEN,
                what=f"golden of {name} belongs to no case",
                facts={"looked_at": f"goldens/{folder.parent.name}/{platform}/{name}.*"},
                next_step="assay record --prune, or restore the case in parity/cases",
            )
            verdicts.append(unused)
    return tuple(verdicts)
