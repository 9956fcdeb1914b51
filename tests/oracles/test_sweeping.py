import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oracles import sweeping
from parity.errors import OracleError
from parity.sweeping.row import Row

STAND_IN = """
import json, os, sys
request = json.load(open(sys.argv[1]))
names = [n for n in ("a/f32/fp/one", "a/f32/fp/deadly", "b/f32/fp/one") if n not in request["answered"]]
print("noise that is no JSON")
for name in names:
    print(json.dumps({"asking": name}), flush=True)
    if name.endswith("deadly"):
        print("heap corrupted", file=sys.stderr, flush=True)
        os._exit(7)
    model, dtype, kv, invariance = name.split("/")
    row = {"subject": "", "model": model, "dtype": dtype, "kv": kv, "invariance": invariance}
    row |= {"verdict": "equal", "where": "", "detail": "", "max_ulp": None, "size": None, "bound": 0.0}
    print(json.dumps({"row": row}), flush=True)
print(json.dumps({"done": len(names)}), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An entry module beside the repository's own."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "mute.py").write_text("raise SystemExit('no such oracle')")
    own = sweeping.hermetic

    def beside(private: Path) -> Mapping[str, str]:
        return {**own(private), "PYTHONPATH": str(tmp_path)}

    monkeypatch.setattr(sweeping, "hermetic", beside)
    return "stand_in"


def swept(entry: str) -> list[Row]:
    options: dict[str, Any] = {"models": {}, "functions": {}, "dtypes": (), "kvs": (), "patterns": ()}
    return list(sweeping.sweep_oracle(entry, Path(sys.executable), subject="toy 1.0", **options))


def test_a_row_that_kills_the_process_is_told_and_the_sweep_goes_on_behind_it(stand_in: str) -> None:
    rows = swept(stand_in)

    assert [(row.name, row.outcome.kind) for row in rows] == [
        ("a/f32/fp/one", "equal"),
        ("a/f32/fp/deadly", "raises"),
        ("b/f32/fp/one", "equal"),
    ]
    assert rows[1].outcome.detail == "the process died: exit code 7"
    assert {row.subject for row in rows} == {"toy 1.0"}


def test_a_process_that_asks_nothing_is_an_error_with_its_last_words(stand_in: str) -> None:
    del stand_in

    with pytest.raises(OracleError) as caught:
        swept("mute")

    assert str(caught.value).splitlines()[0] == "toy 1.0 could not be swept"
    assert "no such oracle" in str(caught.value)
