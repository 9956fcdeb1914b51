"""A noisy machine is told from a quiet one; what is not known is no complaint."""

import os
from pathlib import Path

import pytest

from bench.preflight import complaints, preflight, to_json


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quiet machine of four cores."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4, 9.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    show(tmp_path, swap_free=2_000_000, available=6_000_000)
    process(tmp_path, 4242, mib=100)
    return tmp_path


def show(proc: Path, *, swap_free: int, available: int) -> None:
    (proc / "meminfo").write_text(
        f"MemTotal: 10000000 kB\nMemAvailable: {available} kB\nSwapTotal: 2000000 kB\nSwapFree: {swap_free} kB\n"
    )


def process(proc: Path, pid: int, *, mib: int) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "status").write_text(f"Name:\tx\nVmRSS:\t{mib * 1024} kB\n")


def test_a_quiet_machine_has_no_complaint(proc: Path) -> None:
    conditions = preflight(proc)
    assert complaints(conditions) == []
    assert [(c["name"], c["holds"]) for c in to_json(conditions)] == [
        ("load", True),
        ("swap", True),
        ("free memory", True),
        ("other processes", True),
    ]


def test_load_is_counted_a_core(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (2.4, 0.0, 0.0))
    assert complaints(preflight(proc)) == ["load: 0.60 a core, wanted at most 0.5 a core"]


def test_swap_in_use_is_noise(proc: Path) -> None:
    show(proc, swap_free=1_000_000, available=6_000_000)
    assert complaints(preflight(proc)) == ["swap: 976 MiB in use, wanted at most 512 MiB"]


def test_little_free_memory_is_noise(proc: Path) -> None:
    show(proc, swap_free=2_000_000, available=3_000_000)
    assert complaints(preflight(proc)) == ["free memory: 30%, wanted at least 35%"]


def test_a_large_foreign_process_is_noise_and_the_bench_itself_is_not(proc: Path) -> None:
    process(proc, os.getpid(), mib=9000)
    assert complaints(preflight(proc)) == []
    process(proc, 4243, mib=3000)
    assert complaints(preflight(proc)) == ["other processes: 1 above 2048 MiB, wanted none above 2048 MiB"]


def test_what_a_system_does_not_show_is_unknown(proc: Path, tmp_path: Path) -> None:
    del proc  # load and cores are those of a quiet machine
    conditions = preflight(tmp_path / "none")
    assert complaints(conditions) == []
    assert [c.found for c in conditions[1:]] == ["unknown"] * 3
    assert [c.holds for c in conditions[1:]] == [None] * 3
