"""A message of several processes is printed by the first alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from parity.said_once import SaidOnce

ROOT = Path(__file__).parents[2]


def test_a_message_is_said_once_and_another_one_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message in ("one\n  fact  1", "one\n  fact  1", "two"):
        SaidOnce(tmp_path)(message)
    assert capsys.readouterr().err == "one\n  fact  1\ntwo\n"


def test_processes_that_share_a_folder_say_it_once(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from parity.said_once import SaidOnce; SaidOnce(Path({str(tmp_path)!r}))('m')"
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(3)]
    assert b"".join(process.communicate()[1] for process in started) == b"m\n"


def test_another_run_says_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        SaidOnce(tmp_path / run)("m")
    assert capsys.readouterr().err == "m\nm\n"
