"""Every committed golden of mlx-lm's chain, checked with numpy alone; and that this check can fail.

The goldens of Linux x86-64 are checked on every platform: nothing here runs mlx, so the platform of the test does not matter.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.sampling import numpy_reference as reference
from engine.sampling.numpy_reference import Drawn, Options
from parity.golden import GOLDENS, Golden
from parity.logit_rows import generated_rows, rounded
from parity.sampled_trace import UNIFORMS, XTC_UNIFORMS
from parity.sampling import MODEL
from parity.tensor import Tensor

PLATFORM = "linux-x86_64-cpu"
(FOLDER,) = GOLDENS.glob(f"mlx-lm-*/{PLATFORM}")
FILES = sorted((FOLDER / "samplers" / "mlx-lm").rglob("*.json"))
MODEL_ROWS = FOLDER / "smollm2-135m/f32/fp/greedy/harbour-tail-split.json"
LOGARITHM_ULPS = 8  # two logarithms of Gumbel noise and one of the log-sum-exp, at the scale of the sum


@cache
def model_rows() -> np.ndarray[Any, np.dtype[np.float32]]:
    golden = Golden.load(MODEL_ROWS)
    return np.concatenate([golden.tensors[f"logits/{row}"].values() for row in range(4)]).astype(np.float32)


def rows_of(golden: Golden) -> tuple[Tensor, ...]:
    case = golden.case
    assert case.sampling is not None
    values = model_rows() if case.sampling.rows == MODEL else generated_rows(case.sampling.rows, case.num_rows)
    return rounded(values, case.dtype)


def answer(golden: Golden, **changes: Any) -> list[Drawn]:
    case = golden.case
    assert case.sampling is not None
    options = replace(Options(**case.sampling.named), **changes)
    return reference.run(
        np.concatenate([row.values() for row in rows_of(golden)]).astype(np.float32),
        options,
        case.dtype,  # type: ignore[arg-type]
        seed=case.sampling.seed,
        batch=case.sampling.batch,
        num_draws=case.num_steps,
        history=case.prompt_ids,
    )


def ids_of(draws: list[Drawn]) -> tuple[int, ...]:
    return tuple(int(token) for drawn in draws for token in drawn.ids)


def test_there_are_goldens_to_check() -> None:
    assert len(FILES) >= 150
    assert {json.loads(file.read_text())["case"]["dtype"] for file in FILES} == {"f32", "bf16"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(FOLDER).with_suffix("").as_posix())
def test_numpy_alone_reproduces_the_golden(file: Path) -> None:
    golden = Golden.load(file)
    assert [row.digest for row in rows_of(golden)] == [golden.digests[f"logits/{n}"] for n in range(4)]

    draws = answer(golden)

    assert ids_of(draws) == golden.token_ids
    if UNIFORMS in golden.tensors:
        assert Tensor.of(np.stack([drawn.uniforms for drawn in draws])).digest == golden.digests[UNIFORMS]
    if XTC_UNIFORMS in golden.tensors:
        drawn = np.array([drawn.xtc_uniform for drawn in draws], np.float32)
        assert Tensor.of(drawn).digest == golden.digests[XTC_UNIFORMS]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("samplers/mlx-lm/t07-ties/f32/b1/s42", {"temperature": 0.71}),
        ("samplers/mlx-lm/t07-ties/f32/b3/s42", {"temperature": 0.75}),
        ("samplers/mlx-lm/top-p09-ties/f32/b1/s0", {"top_p": 0.8}),
        ("samplers/mlx-lm/top-k40-ties/bf16/b3/s0", {"top_k": 39}),
        ("samplers/mlx-lm/min-p05-keep5-ties/f32/b1/s0", {"min_tokens_to_keep": 80}),
        ("samplers/mlx-lm/xtc-ties/f32/b1/s0", {"xtc_threshold": 0.01}),
        ("samplers/mlx-lm/xtc-special-ties/f32/b1/s0", {"xtc_special": ()}),
        ("samplers/mlx-lm/penalties-ties/f32/b1/s0", {"presence_penalty": 0.45}),
        ("samplers/mlx-lm/penalties-ties/f32/b1/s0", {"repetition_window": 11}),
        ("samplers/mlx-lm/all-model/f32/b1/s42", {"frequency_penalty": 0.0}),
    ],
)
def test_another_option_gives_other_ids(name: str, changes: dict[str, Any]) -> None:
    golden = Golden.load(FOLDER / f"{name}.json")
    assert ids_of(answer(golden, **changes)) != golden.token_ids


def test_the_reference_needs_neither_mlx_nor_a_model() -> None:
    program = (
        "import sys\n"
        "for name in ('mlx', 'mlx.core', 'mlx_lm', 'tokenizers'):\n    sys.modules[name] = None\n"
        "import engine.sampling.numpy_reference\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=GOLDENS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_draws_that_rounding_of_logarithms_could_turn_are_rare() -> None:
    """Where a winner leads by more than the logarithms can err, its id is certain and not merely seen to agree."""
    golden = Golden.load(FOLDER / "samplers/mlx-lm/t07-model/f32/b3/s42.json")
    leads = np.stack([drawn.lead for drawn in answer(golden)])
    assert (leads > LOGARITHM_ULPS).mean() > 0.99
