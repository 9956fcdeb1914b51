import json
from pathlib import Path

import numpy as np
import pytest

from oracles.llama_cpp.rows import REAL, _distinct, made_rows, main, most_probable
from parity.safetensors_file import dumps, loads
from parity.tensor import Tensor

RECORDED = Path(__file__).parents[2] / "fixtures" / "llama_cpp"


def test_the_committed_rows_are_the_ones_that_are_made() -> None:
    committed = {
        name: np.frombuffer(tensor.data, dtype="<f4")
        for name, tensor in loads((RECORDED / "rows.safetensors").read_bytes()).items()
    }
    made = {**made_rows(), "real64": most_probable(committed["real"])}
    assert committed.keys() - made.keys() == {"real"}
    for name, row in made.items():
        assert row.tobytes() == committed[name].tobytes(), name


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be told apart in float32"):
        _distinct(np.array([2**13]))


def test_a_stored_row_that_is_not_the_goldens_is_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Tensor(dtype="F32", shape=(1, 80), data=np.arange(80, dtype="<f4").tobytes())
    stored, golden = tmp_path / "stored.safetensors", tmp_path / "golden.json"
    stored.write_bytes(dumps({REAL: row}))
    golden.write_text(json.dumps({"entries": [[REAL, "F32", [1, 80], "0" * 64]]}))
    assert main(str(tmp_path), str(stored), str(golden)) == 1
    assert capsys.readouterr().err == "logits/0 of the stored rows is not what the golden lists\n"
    assert not (tmp_path / "rows.safetensors").exists()
    golden.write_text(json.dumps({"entries": [[REAL, "F32", [1, 80], row.digest]]}))
    assert main(str(tmp_path), str(stored), str(golden)) == 0
    written = loads((tmp_path / "rows.safetensors").read_bytes())
    assert np.frombuffer(written["real64"].data, dtype="<f4").tolist() == list(range(16, 80))
