import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oracles.journal import Journal
from oracles.recording_lock import recording_lock
from oracles.registry import REPOSITORY
from oracles.unused import remove_unused
from parity import row_store
from parity.errors import OracleError
from parity.golden import Golden, golden_path
from parity.snapshot import Snapshot
from tests.oracles.shop import Shop, cases_of, do, make_case, names, statuses


def test_a_golden_is_what_the_oracle_answered(shop: Shop) -> None:
    case = make_case(forced_ids=(2, 3))
    recording = do(shop, [case])
    golden = Golden.load(golden_path(case, version="1.0", root=shop.goldens))
    assert statuses(recording) == ["new"]
    assert recording.complete
    assert golden.case == case
    assert golden.token_ids == (2, 3)
    assert golden.cache == ("plain",)
    assert golden.snapshot_files == Snapshot.read(shop.snapshot).logit_files
    assert [entry.reason for entry in golden.history] == ["first recording"]
    assert golden.provenance.switches == {"MLX_DISABLE_COMPILE": "1"}


def test_recording_twice_gives_the_same_bytes_and_runs_everything_again(shop: Shop) -> None:
    cases = cases_of(4)
    do(shop, cases)
    before = shop.files()
    assert statuses(do(shop, cases, jobs=2)) == ["unchanged"] * 4
    assert shop.files() == before
    assert sorted(shop.runs) == sorted(names(4) * 2)


def test_a_case_that_fails_costs_no_other_case(shop: Shop) -> None:
    cases = cases_of(5)
    shop.faults(**{"raise": [names(5)[1]], "exit": [names(5)[2]], "nan": [names(5)[3]]})
    recording = do(shop, cases)
    assert statuses(recording) == ["new", "failed", "failed", "failed", "new"]
    assert str(recording.results[1].error).splitlines() == [
        "oracle fake 1.0 could not run a case",
        "  case  tiny/f32/fp/greedy/p1",
        "  kind  NotImplementedError",
        "  said  this cache cannot be quantised",
        "  next  correct the case in parity/cases/*.toml, or take it out: this oracle cannot answer it",
    ]
    assert "kind  SystemExit" in str(recording.results[2].error)
    assert "reason  row 0 holds NaN" in str(recording.results[3].error)
    assert not golden_path(cases[3], version="1.0", root=shop.goldens).exists()


def test_a_process_that_dies_costs_only_the_case_it_was_at(shop: Shop) -> None:
    cases = cases_of(4)
    shop.faults(die=[names(4)[1]])
    recording = do(shop, cases)
    assert statuses(recording) == ["new", "failed", "new", "new"]
    message = str(recording.results[1].error)
    assert "the process of oracle fake 1.0 ended in the middle of a case" in message
    assert "exit code   -9" in message
    assert "last words" in message


def test_a_runner_that_does_not_start_fails_every_case_and_ends(shop: Shop) -> None:
    shop.oracle = replace(shop.oracle, entry="tests.oracles.no_such_module")
    recording = do(shop, cases_of(2))
    assert statuses(recording) == ["failed", "failed"]
    assert "No module named tests.oracles.no_such_module" in str(recording.results[0].error)


def test_a_trace_that_does_not_answer_the_case_becomes_no_golden(shop: Shop) -> None:
    case = make_case()
    shop.faults(short=[case.name])
    recording = do(shop, [case])
    assert statuses(recording) == ["failed"]
    assert "reason  1 rows of logits for 2 steps" in str(recording.results[0].error)
    assert shop.files() == {}


def test_other_versions_than_pinned_become_no_golden(shop: Shop) -> None:
    shop.oracle = replace(shop.oracle, pins={"mlx": "9.9.9"})
    recording = do(shop, [make_case()])
    assert statuses(recording) == ["failed"]
    assert "pinned are {'mlx': '9.9.9'}" in str(recording.results[0].error)


def test_into_leaves_the_committed_goldens_alone_and_gives_the_same_bytes(shop: Shop, tmp_path: Path) -> None:
    cases = cases_of(2)
    do(shop, cases)
    before = shop.files()
    into = tmp_path / "sample"
    assert statuses(do(shop, cases, into=into)) == ["unchanged", "unchanged"]
    assert shop.files(into) == before
    shop.faults(salt="x")
    assert statuses(do(shop, cases, into=tmp_path / "other")) == ["refused", "refused"]
    assert shop.files() == before
    assert not (tmp_path / "other").exists()


def test_into_carries_the_committed_history(shop: Shop, tmp_path: Path) -> None:
    case = make_case()
    do(shop, [case])
    shop.faults(salt="x")
    do(shop, [case], reason="meant")
    do(shop, [case], into=tmp_path / "sample")
    assert shop.files(tmp_path / "sample") == shop.files()


def test_large_rows_are_kept_outside_git(shop: Shop, tmp_path: Path) -> None:
    case = make_case()
    shop.faults(width=200)
    do(shop, [case], into=tmp_path / "sample")
    assert not row_store.rows_path(case, "1.0").exists()
    do(shop, [case])
    golden = Golden.load(golden_path(case, version="1.0", root=shop.goldens))
    rows = row_store.load(case, "1.0", golden.digests)
    assert golden.form == "sketch"
    assert rows is not None
    assert rows["logits/0"].shape == (1, 1600)
    assert np.array_equal(rows["token_ids"].values(), golden.token_ids)


def test_a_second_recording_is_told_who_holds_the_first(shop: Shop) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom oracles.recording_lock import recording_lock\n"
        "with recording_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    journal = Journal.of(shop.goldens).folder
    holder = subprocess.Popen([sys.executable, "-c", program, journal], stdout=subprocess.PIPE, cwd=REPOSITORY)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(OracleError) as refused:
            do(shop, [make_case()])
        assert str(refused.value).splitlines() == [
            "another recording is writing these goldens",
            f"  held by  process {holder.pid}",
            "  next     wait until it ends, or end that process; what it finished is kept",
        ]
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert statuses(do(shop, [make_case()])) == ["new"]  # the system freed the lock with its holder


def test_two_goldens_folders_may_be_recorded_at_once(shop: Shop, tmp_path: Path) -> None:
    with recording_lock(Journal.of(tmp_path / "elsewhere").folder):
        assert statuses(do(shop, [make_case()])) == ["new"]


def test_goldens_that_no_case_claims_are_listed_and_removed_only_on_demand(shop: Shop) -> None:
    cases = cases_of(3)
    do(shop, cases)
    recording = do(shop, cases[:1], all_cases=cases[:2])
    orphan = golden_path(cases[2], version="1.0", root=shop.goldens)
    assert recording.unused == (orphan,)
    assert orphan.exists()
    remove_unused(recording.unused, shop.goldens)
    assert not orphan.exists()
    assert not orphan.with_suffix(".safetensors").exists()
    assert golden_path(cases[1], version="1.0", root=shop.goldens).exists()
