import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oracles.journal import Journal
from oracles.registry import REPOSITORY
from parity.case import Case
from parity.golden import Golden, golden_path
from parity.snapshot import Snapshot
from tests.oracles.shop import Shop, cases_of, do, make_case, names

KILLED = """
import json, sys
from pathlib import Path
from oracles.recording import record
from parity.case import Case
from tests.oracles.shop import Shop, fake_oracle

folder = Path(sys.argv[1])
cases = [Case.from_json(raw) for raw in json.loads(sys.argv[2])]

def say(result):
    print(result.case, flush=True)

shop = Shop(folder, fake_oracle(folder))
record(cases, workshop=shop.workshop, root=shop.goldens, jobs=2, on_result=say)
"""


def start_recording(shop: Shop, cases: list[Case]) -> subprocess.Popen[bytes]:
    listed = json.dumps([case.to_json() for case in cases])
    command = [sys.executable, "-c", KILLED, str(shop.folder), listed]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY)


def test_a_recording_killed_at_any_moment_resumes_and_never_leaves_half_a_golden(shop: Shop, tmp_path: Path) -> None:
    cases = cases_of(14)
    do(shop, cases, into=tmp_path / "wanted")
    wanted = shop.files(tmp_path / "wanted")
    (shop.snapshot / "log").unlink()
    shop.faults(seconds=0.02)
    draw = np.random.Generator(np.random.PCG64(7))
    kills = 0
    for _ in range(40):
        if all(golden_path(case, version="1.0", root=shop.goldens).exists() for case in cases):
            break
        running = start_recording(shop, cases)
        enough = len(shop.runs) + int(draw.integers(2, 5))
        while len(shop.runs) < enough and running.poll() is None:
            time.sleep(0.001)
        time.sleep(float(draw.uniform(0, 0.03)))
        kills += running.poll() is None
        running.kill()
        running.communicate()
        for case in cases:
            file = golden_path(case, version="1.0", root=shop.goldens)
            if file.exists():
                Golden.load(file)  # whole, or an error
    else:
        pytest.fail("40 recordings that were killed did not add up to one")
    assert kills >= 3
    recording = do(shop, cases)
    assert recording.complete
    assert shop.files() == wanted


def test_a_resumed_recording_does_not_run_finished_cases_again(shop: Shop) -> None:
    cases = cases_of(6)
    shop.faults(seconds=0.1)
    running = start_recording(shop, cases)
    said = [running.stdout.readline().decode().split()[0] for _ in range(2)]
    running.kill()
    running.communicate()
    recording = do(shop, cases)
    resumed = {result.case for result in recording.results if result.resumed}
    assert set(said) <= resumed
    assert resumed.isdisjoint(shop.own_runs)
    assert resumed | set(shop.own_runs) == {case.name for case in cases}


def keep_trace(shop: Shop, case: Case, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave a finished trace in the journal and no golden, as a recording does that is killed between the two."""
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "forget", lambda *_: None)
        do(shop, [case])
    shutil.rmtree(shop.goldens)
    place = Journal.of(shop.goldens).place(
        case, Snapshot.read(shop.snapshot, name="tiny"), shop.oracle, shop.oracle.source_digest
    )
    assert (place / "trace.json").is_file()
    return place


def test_what_was_kept_for_another_question_is_not_used(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    keep_trace(shop, case, monkeypatch)
    assert not do(shop, [replace(case, prompt_ids=(3, 2, 1))]).results[0].resumed
    (shop.snapshot / "config.json").write_text('{"model_type": "llama", "changed": true}')
    assert not do(shop, [case], reason="another question").results[0].resumed


def test_what_was_kept_from_another_environment_is_not_used(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    keep_trace(shop, case, monkeypatch)
    shop.oracle.lock.write_text("another lock")
    assert not do(shop, [case]).results[0].resumed


def test_a_kept_trace_is_used_unless_everything_is_to_be_fresh(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    keep_trace(shop, case, monkeypatch)
    assert do(shop, [case]).results[0].resumed
    keep_trace(shop, case, monkeypatch)
    assert not do(shop, [case], fresh=True).results[0].resumed


@pytest.mark.parametrize("damage", ["trace.json", "trace.safetensors", "provenance.json"])
def test_a_kept_trace_with_a_file_missing_or_torn_is_computed_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    case = make_case()
    place = keep_trace(shop, case, monkeypatch)
    (place / damage).write_bytes(b"{")
    result = do(shop, [case]).results[0]
    assert (result.status, result.resumed) == ("new", False)


def test_the_journal_is_empty_after_a_recording(shop: Shop, home: Path) -> None:
    shop.faults(nan=[names(2)[0]])
    do(shop, cases_of(2))
    assert [file for file in (home / "recording").iterdir() if file.is_dir()] == []


def test_leftovers_of_killed_writes_are_swept(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    file = golden_path(case, version="1.0", root=shop.goldens)
    leftover = file.with_name(f".{file.name}.abc.partial")
    leftover.write_bytes(b"half")
    do(shop, [case])
    assert not leftover.exists()
