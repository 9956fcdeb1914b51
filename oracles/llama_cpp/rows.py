"""The rows of logits that samplers are recorded on: `python -m oracles.llama_cpp.rows FOLDER STORED_ROWS GOLDEN.json`.

Writes FOLDER/rows.safetensors: drawn and adversarial rows, and the first row of a real model. The real row is read from the
store that `assay record` fills and is believed only if it has the digest that the committed golden lists.
"""

import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from parity.atomic_file import write_atomically
from parity.safetensors_file import dumps, loads
from parity.tensor import Tensor

Row = npt.NDArray[np.float32]
REAL: Final = "logits/0"
LARGEST: Final = 64
SEED: Final = 8


def main(folder: str, stored: str, golden: str) -> int:
    """Write the rows; exit code 1 when the stored row is not the golden's."""
    row = loads(Path(stored).read_bytes())[REAL]
    listed = json.loads(Path(golden).read_text(encoding="utf-8"))
    if [REAL, row.dtype, list(row.shape), row.digest] not in listed["entries"]:
        sys.stderr.write(f"{REAL} of the stored rows is not what the golden lists\n")
        return 1
    real = np.frombuffer(row.data, dtype="<f4").reshape(-1)
    tensors = {
        name: Tensor(dtype="F32", shape=values.shape, data=values.astype("<f4").tobytes())
        for name, values in {**made_rows(), "real": real, "real64": most_probable(real)}.items()
    }
    write_atomically(Path(folder) / "rows.safetensors", dumps(tensors))
    return 0


def made_rows() -> dict[str, Row]:
    """Rows whose values are whole numbers over a power of two, so that any language makes the same bits."""
    draw = np.random.Generator(np.random.PCG64(SEED)).integers
    rows: dict[str, Row] = {
        "normal": _distinct(draw(-512, 513, (12, 300)).sum(axis=0)),
        "wide": _distinct(draw(-512, 513, (12, 2000)).sum(axis=0)),
        "masked": _distinct(draw(-2048, 2049, 80)),
        "ties": draw(-3, 4, 96).astype(np.float32),
        "even": np.zeros(4, dtype=np.float32),  # probabilities and their sums are exact: thresholds can be met
        "flat": np.zeros(50, dtype=np.float32),
        "peaked": np.array([0, 0, 24, 0, 0, 0, 0, 0], dtype=np.float32),
        "pair": np.array([1, 0], dtype=np.float32),
        "single": np.array([1], dtype=np.float32),
    }
    rows["masked"][::3] = -np.inf
    return rows


def most_probable(row: Row) -> Row:
    """The largest logits of a row, in the order of their ids."""
    return row[np.sort(np.argsort(-row, kind="stable")[:LARGEST])]


def _distinct(numbers: npt.NDArray[np.int64]) -> Row:
    """Logits of about the numbers over 512, no two of them equal: llama.cpp's order of ties is its C++ library's."""
    spread = numbers * 2048 + np.arange(len(numbers))
    row = (spread / 2**20).astype(np.float32)
    if len(numbers) > 2048 or np.abs(spread).max() >= 2**24:
        raise ValueError("these numbers cannot be told apart in float32")
    return row


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
