"""Any repository of the hub as a snapshot, through huggingface_hub and its own cache.

Guarantees: downloads are resumable and shared with every other program that uses the hub's cache; the revision is the
commit that was really read, never a branch name; every file has the digest that the hub gave it. Only the files that a
text model needs at the top level are taken. Nothing is ever executed.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from parity.errors import SnapshotError
from parity.models.layout import check_layout
from parity.models.names import HUB_PREFIX, HubRepo
from parity.snapshot import Snapshot

WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
UNWANTED: Final = ("*/*",)
# OSError and the base of all errors of the library's HTTP client, which has changed its name between versions;
# RuntimeError is what its native transfer raises.
ERRORS: Final[tuple[type[Exception], ...]] = (*HfHubHTTPError.__bases__, OSError, RuntimeError, HFValidationError)


def fetch_hub(repo: HubRepo, *, name: str, again: bool, report: Callable[[str], None]) -> Snapshot:
    """Download what is missing and read the snapshot.

    Args:
        repo: Repository and revision.
        name: The snapshot's name, as the user wrote it.
        again: Download every file anew.
        report: Gets a line before long work.

    Raises:
        SnapshotError: The hub cannot be reached, does not have it, or sent other bytes than it promised.
    """
    report(f"asking the hub for {repo.repo_id}")
    folder = _download(repo, name=name, again=again, local_files_only=False)
    report(f"hashing {repo.repo_id}")
    snapshot = Snapshot.read(folder, name=name, repo_id=repo.repo_id, revision=folder.name)
    check_layout(folder, name)
    for file, sha256 in snapshot.files.items():
        _check_content_address(folder / file, sha256, name)
    return snapshot


def cached_path(repo: HubRepo, *, name: str) -> Path:
    """Folder of a repository that is already in the hub's cache; asks nobody.

    Raises:
        SnapshotError: It is not there.
    """
    return _download(repo, name=name, again=False, local_files_only=True)


def _download(repo: HubRepo, *, name: str, again: bool, local_files_only: bool) -> Path:
    try:
        folder = snapshot_download(
            repo.repo_id,
            revision=repo.revision,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
            force_download=again,
            local_files_only=local_files_only,
        )
    except ERRORS as error:
        said = " ".join(str(error).split()) or type(error).__name__
        if local_files_only:
            raise SnapshotError(
                f"snapshot {name!r} is not on this machine",
                repository=repo.repo_id,
                revision=repo.revision or "default branch",
                next_step=f"assay models fetch {name}",
            ) from error
        raise SnapshotError(
            f"the hub did not give {name.removeprefix(HUB_PREFIX)}",
            repository=repo.repo_id,
            revision=repo.revision or "default branch",
            reason=f"{type(error).__name__}: {said[:200]}",
            next_step="check the name, the network and, for a gated repository, hf auth login; or name a local folder",
        ) from error
    return Path(folder)


def _check_content_address(file: Path, sha256: str, name: str) -> None:
    """The hub's cache names a file's content by SHA-256 where it is large, and by git's SHA-1 where it is small."""
    address = file.resolve().name
    if len(address) == 64:
        found = sha256
    elif len(address) == 40:
        data = file.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    else:
        raise SnapshotError(
            f"the cached {file.name} of snapshot {name!r} carries no digest",
            file=file,
            reason="the hub's cache links each file to one that is named by its digest; this is a plain file",
            next_step="name the folder itself to use it unchecked",
        )
    if found != address:
        raise SnapshotError(
            f"{file.name} of snapshot {name!r} is not the file that the hub promised",
            expected=address,
            found=found,
            next_step=f"assay models fetch {name} --again",
        )
