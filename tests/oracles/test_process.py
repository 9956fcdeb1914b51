import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oracles.process import Task, events, hermetic
from oracles.registry import REPOSITORY
from oracles.runner_loop import ORPHANED
from parity.case import Case
from parity.provenance import Provenance
from parity.trace import Trace
from tests.oracles.shop import Shop, make_case


def tasks_of(shop: Shop, *cases: Case) -> list[Task]:
    snapshot = {"name": "tiny", "path": str(shop.snapshot)}
    return [
        Task(case=case.to_json(), snapshot=snapshot, out=shop.folder / "out" / str(i)) for i, case in enumerate(cases)
    ]


def test_a_process_says_what_it_does_and_leaves_complete_traces(shop: Shop) -> None:
    cases = [make_case("a"), make_case("b")]
    said = list(events(shop.oracle, Path(sys.executable), {0: tasks_of(shop, *cases)}))
    assert [(event.kind, event.case) for event in said] == [
        ("ready", None),
        ("started", "a"),
        ("finished", "a"),
        ("started", "b"),
        ("finished", "b"),
        ("ended", None),
    ]
    assert "a library that prints" in said[-1].facts["stderr"]
    assert Trace.load(shop.folder / "out" / "0").token_ids == (0, 1)
    raw = json.loads((shop.folder / "out" / "0" / "provenance.json").read_text())
    assert Provenance.from_json(raw).packages == dict(shop.oracle.pins)


def test_nothing_of_the_parents_environment_reaches_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_PLANTED", "1")
    monkeypatch.setenv("LD_PRELOAD_PLANTED", "1")
    child = hermetic(tmp_path)
    assert "MLX_PLANTED" not in child
    assert {name for name in child if name.startswith("MLX_")} == {"MLX_DISABLE_COMPILE"}
    assert child["HOME"] == child["TMPDIR"] == str(tmp_path)
    assert child["HF_HUB_OFFLINE"] == child["TRANSFORMERS_OFFLINE"] == "1"


def test_leaving_early_kills_the_children(shop: Shop) -> None:
    shop.faults(seconds=20)
    stream = events(shop.oracle, Path(sys.executable), {0: tasks_of(shop, make_case("a"))})
    assert [next(stream).kind, next(stream).kind] == ["ready", "started"]
    while not (shop.snapshot / "pid").exists() or not (shop.snapshot / "pid").read_text():
        time.sleep(0.01)
    child = int((shop.snapshot / "pid").read_text())
    os.kill(child, 0)  # it runs
    stream.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not (shop.folder / "out").exists()  # it was killed, not waited for


def test_a_child_ends_when_its_parent_is_gone(shop: Shop, tmp_path: Path) -> None:
    shop.faults(seconds=60)
    request = tmp_path / "request.json"
    task = tasks_of(shop, make_case("a"))[0]
    described = {"case": dict(task.case), "snapshot": dict(task.snapshot), "out": str(task.out)}
    request.write_text(json.dumps({"tasks": [described]}))
    child = subprocess.Popen(
        [sys.executable, "-m", shop.oracle.entry, request],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
    )
    assert json.loads(child.stdout.readline())["event"] == "ready"
    child.stdin.close()  # what the system does when the parent dies
    assert child.wait(timeout=30) == ORPHANED
    child.stdout.close()


def test_private_folders_are_removed(shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    list(events(shop.oracle, Path(sys.executable), {0: tasks_of(shop, make_case("a"))}))
    deadline = time.monotonic() + 10
    while list((tmp_path / "temporary").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_exception_in_one_job_is_an_event_and_the_other_job_goes_on(shop: Shop) -> None:
    shop.faults(**{"raise": ["a"]})
    jobs = {0: tasks_of(shop, make_case("a")), 1: tasks_of(shop, make_case("b"))}
    said = {event.case: event for event in events(shop.oracle, Path(sys.executable), jobs) if event.case}
    assert said["a"].kind == "failed"
    assert said["a"].facts == {"kind": "NotImplementedError", "message": "this cache cannot be quantised"}
    assert said["b"].kind == "finished"


@pytest.mark.parametrize("count", [0, 3])
def test_a_request_of_any_length_ends(shop: Shop, count: int) -> None:
    said = list(
        events(shop.oracle, Path(sys.executable), {0: tasks_of(shop, *[make_case(str(i)) for i in range(count)])})
    )
    assert said[-1].kind == "ended"
    assert said[-1].facts["code"] == 0
