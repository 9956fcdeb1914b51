"""Every committed golden of mlx-optiq's chain, checked with the numpy reference's parts; and that this check can fail.

The order of the chain and its floor are put together here from what the reference makes public.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.sampling import numpy_reference as reference
from engine.sampling.numpy_floats import DType, Floats, log, rounded, softmax
from engine.sampling.numpy_random import gumbel, key_of, split, uniforms
from engine.sampling.numpy_reference import Options
from parity import logit_rows
from parity.golden import GOLDENS, Golden
from parity.sampled_trace import UNIFORMS
from parity.sampling import MODEL
from parity.tensor import Tensor

PLATFORM = "linux-x86_64-cpu"
(FOLDER,) = GOLDENS.glob(f"mlx-optiq-*/{PLATFORM}")
(MODEL_ROWS,) = GOLDENS.glob(f"mlx-lm-*/{PLATFORM}/smollm2-135m/f32/fp/greedy/harbour-tail-split.json")
FILES = sorted((FOLDER / "samplers" / "optiq").rglob("*.json"))
FLOOR = 1e-30
ORDER = ("top_k", "top_p", "min_p")


@cache
def model_rows() -> Floats:
    golden = Golden.load(MODEL_ROWS)
    return np.concatenate([golden.tensors[f"logits/{row}"].values() for row in range(4)]).astype(np.float32)


def at(value: float, dtype: DType) -> np.float32:
    return np.float32(rounded(np.array([value], np.float32), dtype)[0])


def log_shares(row: Floats, options: dict[str, Any], dtype: DType, order: tuple[str, ...] = ORDER) -> Floats:
    row = rounded(row / at(options["temperature"], dtype), dtype)
    for name in order:
        if name in options:
            row = reference.filtered(row, Options(**{name: options[name]}), dtype)
    return rounded(log(rounded(softmax(row, dtype) + at(FLOOR, dtype), dtype)), dtype)


def answer(golden: Golden, *, order: tuple[str, ...] = ORDER, **changes: Any) -> tuple[tuple[int, ...], Floats]:
    """Ids and the uniforms behind them."""
    case, asked = golden.case, golden.case.sampling
    assert asked is not None
    values = model_rows() if asked.rows == MODEL else logit_rows.generated_rows(asked.rows, case.num_rows)
    rows = logit_rows.rounded(values, case.dtype)
    assert [row.digest for row in rows] == [golden.digests[f"logits/{n}"] for n in range(case.num_rows)]
    dtype: DType = "bf16" if case.dtype == "bf16" else "f32"
    options = {**asked.named, **changes}
    if asked.greedy:
        best = [int(row.values().argmax()) for row in rows]
        return tuple(best[step % len(rows)] for step in range(case.num_steps)), np.empty((0, 1), np.float32)
    shares = [log_shares(row.values().astype(np.float32), options, dtype, order)[0] for row in rows]
    state, ids, behind = key_of(asked.seed), [], []
    for step in range(case.num_steps):
        state, key = split(state)
        drawn = uniforms(key, shares[0].size)
        ids.append(int((shares[step % len(rows)] + gumbel(drawn)).argmax()))
        behind.append(drawn[ids[-1]])
    return tuple(ids), np.array(behind, np.float32)[:, None]


def test_there_are_goldens_to_check() -> None:
    assert len(FILES) >= 40
    assert {json.loads(file.read_text())["case"]["dtype"] for file in FILES} == {"f32", "bf16"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(FOLDER).with_suffix("").as_posix())
def test_numpy_alone_reproduces_the_golden(file: Path) -> None:
    golden = Golden.load(file)
    ids, behind = answer(golden)
    assert ids == golden.token_ids
    assert (UNIFORMS in golden.tensors) == (len(behind) > 0)
    if len(behind):
        assert Tensor.of(behind).digest == golden.digests[UNIFORMS]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("t07-ties/f32/b1/s42", {"temperature": 0.75}),
        ("top-p09-ties/f32/b1/s0", {"top_p": 0.6}),
        ("top-k40-ties/bf16/b1/s0", {"top_k": 39}),
        ("min-p005-ties/f32/b1/s0", {"min_p": 0.5}),
        ("all-model/f32/b1/s42", {"order": ("top_p", "top_k", "min_p")}),
    ],
)
def test_another_option_or_order_gives_other_ids(name: str, changes: dict[str, Any]) -> None:
    golden = Golden.load(FOLDER / f"samplers/optiq/{name}.json")
    assert answer(golden, **changes)[0] != golden.token_ids
