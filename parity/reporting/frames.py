"""Goldens, traces and their differences as pandas frames: what notebooks start from.

Guarantees: figures are those of `parity.golden_view`, `parity.compare` and `parity.distribution`, float64 from stored bits;
a figure that is not known is missing (`NaN`), never guessed. A frame describes; no verdict rests on one.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from parity.compare import TensorDiff
from parity.distribution import RowDistance, log_softmax
from parity.golden_view import GoldenView
from parity.sketch import top_ids
from parity.tensor import FLOATS, Tensor


def golden_frame(view: GoldenView, text: Callable[[Sequence[int]], str] | None = None) -> pd.DataFrame:
    """One row a step, index `step`: `token_id`, `text`, `surprisal`, `entropy_low`, `entropy_high`, `margin`, `top1`.

    Args:
        view: A golden, row by row; surprisal and entropy in nats.
        text: Ids to text, such as a tokenizer's `decode`; without it there is no column `text`.
    """
    rows = [
        {
            "step": step.step,
            "token_id": step.token_id,
            **({} if text is None or step.token_id is None else {"text": text([step.token_id])}),
            "surprisal": step.surprisal,
            "entropy_low": step.entropy_low,
            "entropy_high": step.entropy_high,
            "margin": step.margin,
            "top1": step.top[0].token_id,
        }
        for step in view.steps
    ]
    return pd.DataFrame(rows).set_index("step")


def row_frame(row: Tensor, count: int = 10, text: Callable[[Sequence[int]], str] | None = None) -> pd.DataFrame:
    """The `count` likeliest ids of a row [1, V], index `id`: `logit`, `logprob` (nats), `probability`, and `text`."""
    ids = top_ids(row, count)
    logs = log_softmax(row)[ids]
    columns = {"logit": row.values().reshape(-1)[ids], "logprob": logs, "probability": np.exp(logs)}
    if text is not None:
        columns["text"] = np.array([text([int(i)]) for i in ids], dtype=object)
    return pd.DataFrame(columns, index=pd.Index(ids, name="id"))


def difference_frame(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> pd.DataFrame:
    """One row a tensor that both sides have, in the order of `expected`.

    Returns:
        Columns `kind` (`logits`, `activations`, `token_ids`), `step`, `module` (of activations), `match`, `different` (share of
        the elements, 0 to 1), `max_ulp`, `rms` (of the difference over that of the expected values), `kl` (nats) and `top1`
        (whether the likeliest id agrees), the last two of logits alone.
    """
    rows = []
    for name, want in expected.items():
        if name not in actual:
            continue
        got = actual[name]
        kind, _, rest = name.partition("/")
        step, _, module = rest.partition("/")
        diff = TensorDiff.of(want, got)
        row: dict[str, object] = {
            "kind": kind,
            "step": int(step) if step.isdecimal() else None,
            "module": module or None,
            "match": diff.match.value,
            "different": diff.num_different / diff.num_elements if diff.num_elements else None,
            "max_ulp": diff.max_ulp if diff.num_different else 0,
            "rms": _relative(want, got) if diff.num_elements and want.dtype in FLOATS else None,
        }
        if kind == "logits" and diff.num_elements:
            distance = RowDistance.of(want, got)
            row |= {"kl": distance.kl, "top1": distance.top1_agrees}
        rows.append({"tensor": name, **row})
    return pd.DataFrame(rows).set_index("tensor").astype({"step": "Int64", "max_ulp": "Int64"})


def _relative(expected: Tensor, actual: Tensor) -> float:
    """Root mean square of the difference over that of `expected`; NaN where that is 0."""
    want = expected.values()
    scale = float(np.sqrt(np.mean(want**2)))
    return float(np.sqrt(np.mean((actual.values() - want) ** 2))) / scale if scale else float("nan")
