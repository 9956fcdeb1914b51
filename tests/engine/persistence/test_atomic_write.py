"""kill -9 at any moment of a save leaves the old file or the new one, never another."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.persistence.atomic_write import write_atomically
from engine.persistence.cache_file import load_caches

KILLS = 50
# One process imports, then forks a child a kill: importing mlx fifty times would cost more than all the saves.
PROGRAM = f"""
import json, os, random, signal, sys, time
from pathlib import Path
import mlx.core as mx
from engine.cache.plain import PlainCache
from engine.persistence import cache_file

mx.set_default_device(mx.cpu)  # a forked child has no GPU
target, how = Path(sys.argv[1]), sys.argv[2]
if how == "in place":
    def write(path, pieces):
        with path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                file.flush()
    cache_file.write_atomically = write

def save(file, value):
    full = mx.full((1, 4, 256, 256), value)
    caches = [PlainCache(keys=full, values=full, offset=256)] * 2
    cache_file.save_caches(file, caches, tokens=[value] * 256)

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid

def both():
    save(target.with_name("1"), 1)
    save(target.with_name("2"), 2)
    save(target, 1)
    os._exit(0)

assert os.waitpid(child(both), 0)[1] == 0
known = {{target.with_name(name).read_bytes(): name for name in "12"}}
moment = random.Random(7)

def forever():
    os.write(ready, b"x")
    while True:
        save(target, 2)
        save(target, 1)

found = []
for _ in range({KILLS}):
    reader, ready = os.pipe()
    pid = child(forever)
    os.read(reader, 1)
    time.sleep(moment.uniform(0.0, 0.06))
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    os.close(reader); os.close(ready)
    found.append(known.get(target.read_bytes(), "another"))
print(json.dumps(found))
"""


def killed(folder: Path, how: str) -> list[str]:
    """What the target held after each kill: content `1`, content `2`, or `another`."""
    target = folder / "target"
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(target), how],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: list[str] = json.loads(ended.stdout)
    return found


def test_kill_9_during_a_save_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    found = killed(tmp_path, "whole")
    assert len(found) == KILLS
    assert set(found) <= {"1", "2"}
    # the kills did fall into saves: a child that was killed while it wrote leaves its partial file behind
    assert [file for file in tmp_path.iterdir() if file.suffix == ".partial"]
    assert load_caches(tmp_path / "target").tokens == (int(found[-1]),) * 256


def test_a_save_that_writes_in_place_is_caught_by_the_same_kills(tmp_path: Path) -> None:
    assert "another" in killed(tmp_path, "in place")


def test_pieces_are_asked_for_one_by_one(tmp_path: Path) -> None:
    seen: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(3):
            seen.append(number)
            yield bytes([number])

    write_atomically(tmp_path / "deep" / "x", pieces())
    assert (tmp_path / "deep" / "x").read_bytes() == bytes([0, 1, 2])
    assert seen == [0, 1, 2]
    assert (tmp_path / "deep" / "x").stat().st_mode & 0o777 == 0o644


def test_a_piece_that_fails_leaves_the_old_content_and_no_rubbish(tmp_path: Path) -> None:
    file = tmp_path / "x"
    write_atomically(file, [b"old"])

    def pieces() -> Iterator[bytes]:
        yield b"ne"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_atomically(file, pieces())
    assert file.read_bytes() == b"old"
    assert [other.name for other in tmp_path.iterdir()] == ["x"]


def test_a_kill_before_the_rename_leaves_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "x"
    write_atomically(file, [b"old"])
    program = (
        "import os, signal, sys; from pathlib import Path; from engine.persistence.atomic_write import write_atomically\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1]), [b'new'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(file)], check=False, cwd=Path(__file__).parents[3])
    assert ended.returncode == -signal.SIGKILL
    assert file.read_bytes() == b"old"
