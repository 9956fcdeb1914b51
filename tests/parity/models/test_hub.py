import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from parity.errors import SnapshotError
from parity.models import hub
from parity.models.fetch import ensure_snapshot, snapshot_path
from parity.models.tiny import build_tiny
from parity.safetensors_file import dumps

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TransportError = HfHubHTTPError.__bases__[0]


class Hub:
    """Stands for huggingface_hub's download: a cache folder that links each file to its content's digest."""

    def __init__(self, cache: Path, files: dict[str, bytes]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.folder = cache / "snapshots" / COMMIT
        self.folder.mkdir(parents=True)
        (cache / "blobs").mkdir()
        for name, data in files.items():
            git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            blob = cache / "blobs" / (hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else git)
            blob.write_bytes(data)
            (self.folder / name).symlink_to(blob)

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.asked.append({"repo_id": repo_id, **options})
        return str(self.folder)


@pytest.fixture
def files() -> dict[str, bytes]:
    return {"config.json": b'{"model_type": "llama"}', "model.safetensors": dumps(build_tiny({"x.weight": (2, 2)}))}


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]) -> Hub:
    fake = Hub(tmp_path / "cache", files)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    return fake


def test_a_repository_becomes_a_snapshot_with_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]
) -> None:
    fake = install(monkeypatch, tmp_path, files)
    snapshot = ensure_snapshot("hub:org/name@main")
    assert (snapshot.repo_id, snapshot.revision) == ("org/name", COMMIT)
    assert snapshot.files == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert snapshot_path("hub:org/name@main") == snapshot.path
    assert [asked["local_files_only"] for asked in fake.asked] == [False, True]
    assert fake.asked[0]["revision"] == "main"
    assert fake.asked[0]["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    assert fake.asked[0]["ignore_patterns"] == ["*/*"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_content_that_is_not_what_the_hub_promised_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes], file: str
) -> None:
    fake = install(monkeypatch, tmp_path, files)
    blob = (fake.folder / file).resolve()
    blob.write_bytes(files[file] + b" ")
    with pytest.raises(SnapshotError, match=f"{file} of snapshot 'hub:org/name' is not") as caught:
        ensure_snapshot("hub:org/name")
    assert caught.value.facts["expected"] == blob.name
    assert caught.value.facts["found"] != blob.name
    assert caught.value.next_step == "assay models fetch hub:org/name --again"


def test_a_cached_file_without_a_digest_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]
) -> None:
    fake = install(monkeypatch, tmp_path, files)
    (fake.folder / "merges.txt").write_text("plain")
    with pytest.raises(SnapshotError, match=r"the cached merges\.txt .* carries no digest"):
        ensure_snapshot("hub:org/name")


def test_an_index_that_leads_outside_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]
) -> None:
    index = json.dumps({"weight_map": {"w": "../../blobs/x.safetensors"}}).encode()
    install(monkeypatch, tmp_path, files | {"model.safetensors.index.json": index})
    with pytest.raises(SnapshotError, match="the index of snapshot 'hub:org/name' is refused"):
        ensure_snapshot("hub:org/name")


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("Got: ConnectError:\n  Name or service not known"),
        TransportError("Name or service not known"),
        ConnectionError("Name or service not known"),
        HFValidationError("Name or service not known"),
        RuntimeError("Name or service not known"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_args: object, **_options: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(SnapshotError) as caught:
        ensure_snapshot("hub:org/name@v1")
    said = " ".join(str(error).split())
    assert str(caught.value) == (
        "the hub did not give org/name@v1\n"
        "  repository  org/name\n"
        "  revision    v1\n"
        f"  reason      {type(error).__name__}: {said}\n"
        "  next        check the name, the network and, for a gated repository, hf auth login; or name a local folder"
    )


def test_a_repository_that_is_not_cached_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> str:
        raise LocalEntryNotFoundError("nothing here")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(SnapshotError) as caught:
        snapshot_path("hub:org/name")
    assert str(caught.value) == (
        "snapshot 'hub:org/name' is not on this machine\n"
        "  repository  org/name\n"
        "  revision    default branch\n"
        "  next        assay models fetch hub:org/name"
    )
