import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parity.errors import SnapshotError
from parity.models import fetch, tiny, tiny_catalogue
from parity.models.catalogue import Entry, GgufSource, entries
from parity.models.fetch import MARKER, ensure_entry, ensure_snapshot, snapshot_path
from parity.models.gguf_llama import convert
from parity.models.wheel import WheelMember
from parity.snapshot import Snapshot

TINY = entries()["llama-tiny"]


@pytest.fixture
def small(make_gguf: Callable[..., Path], make_wheel: Callable[[bytes], WheelMember], tmp_path: Path) -> Entry:
    """An entry like the real ones: a GGUF file in a wheel that pip finds, every digest pinned."""
    gguf = make_gguf()
    expected = tmp_path / "expected"
    expected.mkdir()
    convert(gguf, expected, "packed")
    return Entry(
        name="small",
        title="small",
        dtype="float32",
        licence="MIT",
        source=GgufSource(wheel=make_wheel(gguf.read_bytes()), form="packed"),
        files=Snapshot.read(expected).files,
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def visible(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.endswith(".lock"))


def test_a_name_becomes_a_verified_folder(home: Path) -> None:
    snapshot = ensure_snapshot("llama-tiny")
    assert snapshot.path == home / "models" / "llama-tiny" == snapshot_path("llama-tiny")
    assert snapshot.name == "llama-tiny"
    assert snapshot.files == TINY.files
    assert visible(home / "models") == ["llama-tiny"]


def test_from_wheel_to_folder_without_leftovers(small: Entry, home: Path) -> None:
    said: list[str] = []
    snapshot = ensure_entry(small, home, report=said.append)
    assert snapshot.files == small.files
    assert visible(home / "models") == ["small"]
    assert sorted(file.name for file in snapshot.path.iterdir()) == sorted([MARKER, *small.files])
    assert said == [
        "downloading assay-small 1.0",
        "unpacking small.gguf",
        "converting small",
        "hashing small",
    ]


def test_what_is_there_is_not_made_again(small: Entry, home: Path) -> None:
    ensure_entry(small, home)
    said: list[str] = []
    ensure_entry(small, home, report=said.append)
    assert said == ["hashing small"]


def test_again_makes_it_anew_from_the_kept_download(small: Entry, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensure_entry(small, home).path
    (path / "model.safetensors").write_bytes(b"damaged")
    monkeypatch.setattr("subprocess.run", None)
    assert ensure_entry(small, home, again=True).files == small.files
    assert visible(home / "models") == ["small"]


def test_what_a_kill_between_the_two_renames_left_is_cleared(home: Path) -> None:
    path = ensure_snapshot("llama-tiny").path
    old = path.with_name(".llama-tiny.old")
    path.rename(old)
    with pytest.raises(SnapshotError, match="is not on this machine"):
        snapshot_path("llama-tiny")
    assert ensure_snapshot("llama-tiny").files == TINY.files
    assert visible(home / "models") == ["llama-tiny"]


def test_a_flipped_bit_is_an_error_that_names_both_digests(home: Path) -> None:
    weights = ensure_snapshot("llama-tiny").path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(SnapshotError) as caught:
        ensure_snapshot("llama-tiny")
    assert str(caught.value) == (
        "snapshot 'llama-tiny' is not the one that the catalogue pins\n"
        "  file      model.safetensors\n"
        f"  expected  {TINY.files['model.safetensors']}\n"
        f"  found     {Snapshot.read(home / 'models' / 'llama-tiny').files['model.safetensors']}\n"
        "  next      assay models fetch llama-tiny --again"
    )
    assert ensure_snapshot("llama-tiny", again=True).files == TINY.files


@pytest.mark.parametrize("plant", ["missing", "extra"])
@pytest.mark.usefixtures("home")
def test_a_file_too_few_or_too_many_is_an_error(plant: str) -> None:
    path = ensure_snapshot("llama-tiny").path
    if plant == "extra":
        (path / "adapter.safetensors").write_bytes(b"")
        said = "file      adapter.safetensors\n  expected  no such file"
    else:
        (path / "config.json").unlink()
        said = "no usable config.json"
    with pytest.raises(SnapshotError, match=said):
        ensure_snapshot("llama-tiny")


def test_a_recipe_that_gives_other_bytes_leaves_no_snapshot(home: Path) -> None:
    wrong = replace(TINY, files=TINY.files | {"model.safetensors": "f" * 64})
    with pytest.raises(SnapshotError, match=f"expected  {'f' * 64}\n  found     {TINY.files['model.safetensors']}"):
        ensure_entry(wrong, home)
    assert not (home / "models" / "llama-tiny").exists()


@pytest.mark.usefixtures("home")
def test_a_failed_remake_keeps_the_old_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensure_snapshot("llama-tiny").path
    monkeypatch.setattr(tiny, "draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ensure_snapshot("llama-tiny", again=True)
    assert Snapshot.read(path).files == TINY.files


@pytest.mark.usefixtures("home")
def test_a_snapshot_of_an_older_recipe_is_made_anew() -> None:
    path = ensure_snapshot("llama-tiny").path
    marker = json.loads((path / MARKER).read_text())
    marker["files"]["model.safetensors"] = "0" * 64
    (path / MARKER).write_text(json.dumps(marker))
    with pytest.raises(SnapshotError, match="made by another version of its recipe"):
        snapshot_path("llama-tiny")
    said: list[str] = []
    ensure_snapshot("llama-tiny", report=said.append)
    assert said == ["drawing llama-tiny", "hashing llama-tiny"]
    assert snapshot_path("llama-tiny") == path


def test_an_interrupted_fetch_resumes_from_the_download(
    small: Entry, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ensure_entry(small, home)
    assert visible(home / "models") == [".small.partial"]
    monkeypatch.setattr("subprocess.run", None)  # pip is not asked again
    assert ensure_entry(small, home).files == small.files
    assert visible(home / "models") == ["small"]


KILLED = """
import os, signal
from pathlib import Path
from parity.models import fetch
fetch.check_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
fetch.ensure_snapshot("llama-tiny")
"""


def test_killed_just_before_the_rename_nothing_is_read_as_a_snapshot(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        env={**os.environ, "PYTHONPATH": str(Path(fetch.__file__).parents[2])},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert visible(home / "models") == [".llama-tiny.partial"]
    with pytest.raises(SnapshotError, match="is not on this machine"):
        snapshot_path("llama-tiny")
    assert ensure_snapshot("llama-tiny").files == TINY.files
    assert visible(home / "models") == ["llama-tiny"]


@pytest.mark.usefixtures("home")
def test_two_at_once_make_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started, waiting = threading.Event(), threading.Event()
    made: list[str] = []
    write = tiny_catalogue.write

    def slow(*args: object, **options: object) -> None:
        made.append("made")
        started.set()
        assert waiting.wait(30)
        write(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tiny_catalogue, "write", slow)
    said: list[str] = []

    def second() -> None:
        started.wait(30)
        ensure_snapshot("llama-tiny", report=lambda line: (said.append(line), waiting.set())[0])

    threads = [threading.Thread(target=ensure_snapshot, args=("llama-tiny",)), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == ["made"]
    assert said == ["waiting for another fetch of llama-tiny to finish", "hashing llama-tiny"]
    assert snapshot_path("llama-tiny").is_dir()


def test_an_absent_snapshot_names_the_command(home: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        snapshot_path("smollm2-135m-f32")
    assert str(caught.value) == (
        "snapshot 'smollm2-135m-f32' is not on this machine\n"
        f"  looked at  {home / 'models' / 'smollm2-135m-f32'}\n"
        "  state      absent\n"
        "  next       assay models fetch smollm2-135m-f32"
    )
    assert not home.exists()


def test_a_folder_that_no_fetch_made_is_not_replaced(home: Path) -> None:
    mine = home / "models" / "llama-tiny"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(SnapshotError, match="a folder that no fetch made"):
        ensure_snapshot("llama-tiny")
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "file"))
    with pytest.raises(SnapshotError, match="could not be written or read") as caught:
        ensure_snapshot("llama-tiny")
    assert str(caught.value.facts["reason"]).startswith("Not a directory")


def test_a_local_folder_is_used_as_it_is(home: Path, tmp_path: Path) -> None:
    source = ensure_snapshot("llama-tiny").path
    local = tmp_path / "local"
    local.mkdir()
    for file in TINY.files:
        (local / file).write_bytes((source / file).read_bytes())
    snapshot = ensure_snapshot(str(local))
    assert (snapshot.path, snapshot.files) == (local, TINY.files)
    assert snapshot_path(str(local)) == local
    assert home in source.parents


def test_a_local_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    for ask in (ensure_snapshot, snapshot_path):
        with pytest.raises(SnapshotError, match="there is no folder"):
            ask(str(tmp_path / "nothing"))


def test_a_local_index_that_leads_outside_is_refused(home: Path, tmp_path: Path) -> None:
    local = ensure_snapshot("llama-tiny").path.rename(tmp_path / "local")
    (local / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../secret.safetensors"}}')
    for ask in (ensure_snapshot, snapshot_path):
        with pytest.raises(SnapshotError, match="is refused"):
            ask(str(local))
    assert home.exists()
