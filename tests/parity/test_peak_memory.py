"""The mark follows what a process holds, whoever allocated it, and can be set back where the system allows it."""

import subprocess
import sys
from pathlib import Path

import pytest

from parity import peak_memory
from parity.peak_memory import CLEAR, peak_resident_bytes, reset_peak

ROOT = Path(__file__).parents[2]
HELD = 200 * 2**20


def test_what_was_held_once_stays_in_the_mark_until_it_is_set_back() -> None:
    code = f"""
import os
from parity.peak_memory import peak_resident_bytes, reset_peak
reset_peak()
before = peak_resident_bytes()
held = bytearray(os.urandom(1)) * {HELD}
during = peak_resident_bytes()
del held
after = peak_resident_bytes()
reset_peak()
print(before, during, after, peak_resident_bytes())
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    before, during, after, again = map(int, said.split())
    assert during - before > HELD // 2
    assert after - before > HELD // 2
    if CLEAR.exists():
        assert again < after - HELD // 2


def test_elsewhere_the_mark_is_of_the_whole_life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak_memory, "STATUS", tmp_path / "status")
    monkeypatch.setattr(peak_memory, "CLEAR", tmp_path / "no" / "clear_refs")
    reset_peak()
    assert peak_resident_bytes() > 2**20
