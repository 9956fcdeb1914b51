"""Runs are appended whole, found by name, and never lost in silence."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.history import Run, append, current_commit, find, history_file, identity, is_on_main, load, rows
from parity.errors import AssayError, UsageError

FIGURE = {
    "name": "decode/s/f32/p32",
    "peer": "mlx-lm",
    "unit": "tok/s",
    "engine": 4.0,
    "peer_value": 2.0,
    "ratio": 2.0,
    "low": 1.9,
    "high": 2.1,
    "engine_range": [3.9, 4.1],
    "peer_range": [2.0, 2.0],
    "bits_identical": True,
}


def run(number: int, commit: str | None = "abcdef012345") -> Run:
    return Run(number=number, commit=commit, noisy=(), figures=(FIGURE,))


def test_a_run_is_read_back_as_it_was_appended(tmp_path: Path) -> None:
    file = tmp_path / "new" / "m.jsonl"
    first = append(file, figures=[FIGURE], noisy=["load: 3.00 a core"], commit="abcdef012345+")
    second = append(file, figures=[FIGURE], noisy=[], commit=None)
    assert load(file) == [first, second]
    assert (first.number, second.number) == (1, 2)
    assert (first.label, second.label) == ("run 1 (abcdef012345+)", "run 2 (no commit)")


def test_no_file_is_no_history(tmp_path: Path) -> None:
    assert load(tmp_path / "m.jsonl") == []


@pytest.mark.parametrize("damage", ["{", '{"number": 1}', "[]"])
def test_a_damaged_line_is_named(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    append(file, figures=[FIGURE], noisy=[], commit=None)
    with file.open("a") as stream:
        stream.write(damage + "\n")
    with pytest.raises(AssayError) as caught:
        load(file)
    lines = str(caught.value).splitlines()
    assert lines[:3] == ["the bench history is damaged", "  file    m.jsonl", "  line    2"]
    assert lines[-1] == "  next    remove that line"


@pytest.mark.parametrize(
    ("name", "number"),
    [("1", 1), ("last", 3), ("last~1", 2), ("last~2", 1), ("main", 1), ("1234567", 2), ("abcdef012345", 3)],
)
def test_a_run_is_found_by_name(name: str, number: int) -> None:
    runs = [run(1, "aaaaaaaaaaaa"), run(2, "123456789abc+"), run(3)]
    assert find(runs, name, is_on_main=lambda commit: commit == "aaaaaaaaaaaa").number == number


@pytest.mark.parametrize("name", ["4", "last~3", "main", "feedbee", "yesterday"])
def test_a_run_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find([run(1, "aaaaaaaaaaaa+"), run(2, None)], name, is_on_main=lambda _: True)
    assert str(caught.value).splitlines() == [
        f"the bench history of this machine has no run {name!r}",
        "  runs   run 1 (aaaaaaaaaaaa+), run 2 (no commit)",
        "  known  a number, last, last~1, a commit, main",
        "  next   assay bench --full, or name one of these",
    ]


def test_a_machine_is_its_processor_its_cores_and_mlx() -> None:
    machine: dict[str, Any] = {
        "processor": "p",
        "cores": 2,
        "packages": {"mlx": "1"},
        "load_before": [1],
        "python": "3",
    }
    assert identity(machine) == identity({**machine, "load_before": [9], "python": "4"})
    others = [{**machine, "processor": "q"}, {**machine, "cores": 4}, {**machine, "packages": {"mlx": "2"}}]
    assert len({identity(m) for m in [machine, *others]}) == 4
    assert history_file("abc", "full").name == "abc-full.jsonl"


def test_rows_have_a_figure_of_a_run_each() -> None:
    (row,) = rows([run(7)])
    assert row == {
        "run": 7,
        "commit": "abcdef012345",
        "noisy": False,
        "name": "decode/s/f32/p32",
        "peer": "mlx-lm",
        "unit": "tok/s",
        "engine": 4.0,
        "peer_value": 2.0,
        "ratio": 2.0,
        "low": 1.9,
        "high": 2.1,
        "engine_low": 3.9,
        "engine_high": 4.1,
        "bits_identical": True,
    }


def test_the_commit_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identified = ["-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identified, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    assert current_commit(tmp_path) is None
    git("init", "-b", "main")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "one")
    clean = current_commit(tmp_path)
    assert clean is not None
    assert len(clean) == 12
    assert is_on_main(clean, tmp_path)
    assert not is_on_main("0" * 12, tmp_path)
    (tmp_path / "f").write_text("2")
    assert current_commit(tmp_path) == f"{clean}+"
