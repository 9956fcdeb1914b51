import hashlib
from pathlib import Path

import pytest

from parity.errors import SnapshotError
from parity.snapshot import Snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "quantization": {"bits": 4}}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / ".marker").write_text("hidden")
    return folder


def test_every_visible_file_is_hashed_from_its_bytes(folder: Path) -> None:
    snapshot = Snapshot.read(folder)

    assert list(snapshot.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert snapshot.files["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    assert (snapshot.name, snapshot.config["model_type"], snapshot.quantization) == ("toy", "llama", {"bits": 4})


def test_logits_depend_on_config_and_weights_alone(folder: Path) -> None:
    before = Snapshot.read(folder)
    (folder / "tokenizer.json").write_text('{"changed": true}')
    (folder / "README.md").write_text("new")

    assert Snapshot.read(folder).logit_files == before.logit_files
    assert set(before.logit_files) == {"config.json", "model.safetensors"}


def test_one_changed_byte_of_the_weights_changes_their_digest(folder: Path) -> None:
    before = Snapshot.read(folder)
    (folder / "model.safetensors").write_bytes(b"weighta")

    assert Snapshot.read(folder).logit_files != before.logit_files


def test_a_missing_folder_names_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as error:
        Snapshot.read(tmp_path / "gone")

    assert str(error.value).splitlines() == [
        "no snapshot 'gone'",
        f"  looked at  {tmp_path / 'gone'}",
        "  next       assay models fetch gone",
    ]


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(SnapshotError, match="snapshot 'toy' has no weights"):
        Snapshot.read(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "it does not exist"), ("{", "not JSON"), ("[]", "a JSON list where an object belongs")],
)
def test_an_unusable_config_is_refused_with_the_reason(folder: Path, text: str | None, reason: str) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)

    with pytest.raises(SnapshotError, match=reason):
        Snapshot.read(folder)
