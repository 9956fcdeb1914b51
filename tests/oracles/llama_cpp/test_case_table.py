import hashlib
import json
from pathlib import Path

import pytest

from oracles.llama_cpp.case_table import expanded, load_cases
from parity.safetensors_file import loads
from parity.tensor import Tensor

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "fixtures" / "llama_cpp"
GOLDEN = ROOT / "goldens/mlx-lm-0.32.2/linux-x86_64-cpu/smollm2-135m/f32/fp/greedy/forest-tail-split.json"
FOUND = {"ids", "logits", "left_probs", "picked_from", "probs", "draws"}


def test_the_recording_is_of_the_cases_that_the_table_holds_now() -> None:
    recorded = json.loads((RECORDED / "samplers.json").read_text())
    asked = {name: {k: v for k, v in case.items() if k not in FOUND} for name, case in recorded.items()}
    assert asked == {case["name"]: {k: v for k, v in case.items() if k != "name"} for case in load_cases()}
    long_draws = loads((RECORDED / "long_draws.safetensors").read_bytes())
    for name, case in recorded.items():
        count = len(case["draws"]) if "draws" in case else long_draws[name].shape[0]
        assert count == case["num_draws"], name


def test_the_real_row_is_the_one_that_the_golden_lists() -> None:
    row = loads((RECORDED / "rows.safetensors").read_bytes())["real"]
    as_recorded = Tensor(dtype="F32", shape=(1, 49152), data=row.data)
    assert ["logits/0", "F32", [1, 49152], as_recorded.digest] in json.loads(GOLDEN.read_text())["entries"]
    assert hashlib.sha256(b"F32[1, 49152]" + row.data).hexdigest() == as_recorded.digest


def test_an_unknown_key_and_a_name_twice_are_refused() -> None:
    table = {"name": "a", "rows": ["pair"], "chain": []}
    with pytest.raises(ValueError, match=r"unknown keys \['chian'\] of case a"):
        list(expanded({"case": [{**table, "chian": []}]}))
    with pytest.raises(ValueError, match="two cases are named a/pair/s42"):
        list(expanded({"case": [table, table]}))
