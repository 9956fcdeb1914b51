"""One patch set a process, and tiles that never ran are an error."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oracles.mlx_optiq import run
from oracles.mlx_optiq.patches import Installed
from parity.case import Case
from parity.kv import KV
from tests.oracles.shop import make_case


def tasks(*words: str) -> list[dict[str, Any]]:
    return [{"case": {"kv": word}, "out": f"{number}"} for number, word in enumerate(words)]


def test_tasks_of_one_patch_set_stay_together_in_their_order() -> None:
    given = tasks("kv8-g64", "fp", "kv4-g32-s9", "config-8g64_0", "kv8-g64-tiled16-lifted", "config-8g64_0-s5")
    sets = run.by_patch_set(given)
    assert [[task["out"] for task in members] for _, members in sets] == [["0", "2"], ["1"], ["3", "5"], ["4"]]
    assert [kv.name for kv, _ in sets] == ["kv8-g64", "fp", "config-8g64_0", "kv8-g64-tiled16-lifted"]


def request(folder: Path, *words: str) -> str:
    file = folder / "request.json"
    file.write_text(json.dumps({"tasks": tasks(*words)}))
    return str(file)


def test_a_request_of_one_set_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    def serve(file: str, start: Any) -> int:
        monkeypatch.setattr(run, "start", lambda kv: kv.name)
        served.append((file, start()))
        return 0

    monkeypatch.setattr(run, "serve", serve)
    file = request(tmp_path, "kv8-g64", "kv4-g64")
    assert run.main(file) == 0
    assert served == [(file, "kv8-g64")]


@pytest.mark.parametrize(("codes", "code", "ran"), [([0, 0], 0, 2), ([3, 0], 3, 1), ([0, 1], 1, 2)])
def test_a_request_of_several_sets_is_handed_to_a_process_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int], code: int, ran: int
) -> None:
    asked: list[list[str]] = []

    def process(command: list[str], *, check: bool) -> SimpleNamespace:
        assert command[:3] == [sys.executable, "-m", "oracles.mlx_optiq.run"]
        assert not check
        part = json.loads(Path(command[3]).read_text())
        asked.append([task["case"]["kv"] for task in part["tasks"]])
        return SimpleNamespace(returncode=codes[len(asked) - 1])

    monkeypatch.setattr(run.subprocess, "run", process)  # type: ignore[attr-defined]
    assert run.main(request(tmp_path, "kv8-g64", "fp", "kv4-g64")) == code
    assert asked == [["kv8-g64", "kv4-g64"], ["fp"]][:ran]


class Capture:
    """Runs tiled attention as often as it is told to."""

    def __init__(self, runs: int) -> None:
        self.total, self._runs = 5, runs  # of cases before this one

    def __call__(self, _case: Case, _model: object) -> Any:
        self.total += self._runs
        return "trace"


@pytest.mark.parametrize(("word", "runs"), [("kv8-g64-tiled16-lifted", 3), ("kv8-g64", 0)])
def test_tiles_that_ran_as_asked_pass(word: str, runs: int) -> None:
    capture = Capture(runs)
    watched = run.watching_tiles(capture, Installed(patches=(), tiles_run=lambda: capture.total))
    assert watched(make_case(kv=KV.parse(word)), None) == "trace"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("word", "runs"), [("kv8-g64-tiled16-lifted", 0), ("kv8-g64", 2)])
def test_tiles_that_never_ran_or_ran_unasked_are_an_error(word: str, runs: int) -> None:
    capture = Capture(runs)
    watched = run.watching_tiles(capture, Installed(patches=(), tiles_run=lambda: capture.total))
    with pytest.raises(run.TilesIgnoredError, match=f"{word}: tiled attention ran {runs} times"):
        watched(make_case(kv=KV.parse(word)), None)
