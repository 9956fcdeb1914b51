"""What a row of logits must be before anything is drawn from it, and its log-probabilities.

Guarantees: a row that holds NaN or +inf, or in which every token is ruled out, is refused with a message; nothing is drawn
from it. Input arrays are never modified.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from engine.errors import RequestError


def check_rows(logits_BV: mx.array) -> None:
    """Refuse rows that have no probabilities.

    Args:
        logits_BV: Any floating dtype, [B, V].

    Raises:
        RequestError: It is not [B, V] with at least one token, a row holds NaN or +inf, or is -inf throughout.
    """
    if logits_BV.ndim != 2 or 0 in logits_BV.shape:
        raise RequestError(
            "logits to draw from must be rows [B, V]",
            shape=list(logits_BV.shape),
            next_step="pass the last position alone, with a batch axis",
        )
    largest_B, smallest_B = mx.max(logits_BV, axis=-1), mx.min(logits_BV, axis=-1)
    # max and min of mlx give NaN where a row holds one, so two reductions see all three faults
    largest, smallest = (np.array(a.astype(mx.float32)) for a in (largest_B, smallest_B))
    for row, (top, low) in enumerate(zip(largest, smallest, strict=True)):
        if np.isnan(top) or np.isnan(low):
            raise _refused(logits_BV, row, "NaN", np.isnan, "look for the first NaN in the activations of this step")
        if top == np.inf:
            raise _refused(
                logits_BV, row, "+inf", np.isposinf, "rule tokens out with -inf; force one with a logit bias"
            )
        if top == -np.inf:
            raise RequestError(
                f"every token of row {row} is ruled out",
                logits="-inf throughout",
                next_step="leave at least one token possible: check the mask or the logit bias",
            )


def log_probabilities(logits_BV: mx.array) -> mx.array:
    """Natural log-probabilities, same dtype and shape.

    Numerics: the log of the sum of exponentials is taken in float32 and rounded to the dtype of the logits; the subtraction
        rounds there again, so bfloat16 rows can gain ties.
    """
    return logits_BV - mx.logsumexp(logits_BV, axis=-1, keepdims=True)


def _refused(logits_BV: mx.array, row: int, what: str, is_bad: Callable[[Any], Any], next_step: str) -> RequestError:
    bad = np.flatnonzero(is_bad(np.array(logits_BV[row].astype(mx.float32))))
    return RequestError(
        f"row {row} of the logits holds {what}",
        tokens=", ".join(map(str, bad[:5])) + (", ..." if bad.size > 5 else ""),
        count=f"{bad.size} of {logits_BV.shape[1]}",
        next_step=next_step,
    )
