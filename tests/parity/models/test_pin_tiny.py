"""Pinning draws every form of a config and writes what it found, and only that."""

import hashlib
import json
from pathlib import Path

import pytest

from parity.models import pin_tiny
from parity.models.tiny_catalogue import TinySource, read, write


def test_a_pin_is_the_digests_of_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_tiny, "forms_of", lambda _: ("bf16", "mxfp8"))
    pin_tiny.pin("llama", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["llama.digests.json"]
    pinned = json.loads((tmp_path / "llama.digests.json").read_text())
    assert list(pinned) == ["bf16", "mxfp8"]
    committed = read("llama", ".digests")
    assert pinned == {form: committed[form] for form in pinned}


def test_a_pin_follows_the_bytes_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(source: TinySource, folder: Path) -> None:
        write(source, folder)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
        expected.update({f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()})

    expected: dict[str, str] = {}
    monkeypatch.setattr(pin_tiny, "forms_of", lambda _: ("bf16",))
    monkeypatch.setattr(pin_tiny, "write", damaged)
    pin_tiny.pin("llama", tmp_path)
    pinned = json.loads((tmp_path / "llama.digests.json").read_text())["bf16"]
    assert pinned == expected
    assert pinned["model.safetensors"] != read("llama", ".digests")["bf16"]["model.safetensors"]


def write_names(source: TinySource, folder: Path) -> None:
    """Stand for drawing: two files that tell their form."""
    (folder / "config.json").write_text(json.dumps({"form": source.form}))
    (folder / "model.safetensors").write_text(source.form)


def test_a_pin_has_one_line_a_digest_in_the_order_of_the_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_tiny, "forms_of", lambda config: tuple(read(config, ".digests")))
    monkeypatch.setattr(pin_tiny, "write", write_names)
    pin_tiny.pin("llama", tmp_path)
    text = (tmp_path / "llama.digests.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    assert list(json.loads(text)) == list(read("llama", ".digests"))
