import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parity.atomic_file import write_atomically


def test_the_file_holds_what_was_written_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "x.json"

    write_atomically(file, b"one")
    write_atomically(file, b"two")

    assert file.read_bytes() == b"two"
    assert [f.name for f in file.parent.iterdir()] == ["x.json"]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_content_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    write_atomically(file, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, b"new")

    assert file.read_bytes() == b"old"
    assert [f.name for f in tmp_path.iterdir()] == ["x.json"]


def test_a_kill_in_the_middle_leaves_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_atomically(file, b"old")
    program = (
        "import os, signal, sys; from pathlib import Path; from parity.atomic_file import write_atomically\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1]), b'new')\n"
    )

    ended = subprocess.run([sys.executable, "-c", program, str(file)], check=False, cwd=Path(__file__).parents[2])

    assert ended.returncode == -signal.SIGKILL
    assert file.read_bytes() == b"old"
    assert [f.suffix for f in tmp_path.iterdir() if f != file] == [".partial"]
