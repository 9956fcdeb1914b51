"""The trace that answers a sampler case: its rows, the randomness behind the draws, the ids.

Guarantees: tensors come in the order in which a draw makes them, ids last; nothing is computed here. The names are what an
engine in another language writes too.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name

UNIFORMS: Final = "uniforms"
XTC_UNIFORMS: Final = "xtc_uniforms"


def sampled_trace(
    rows: Sequence[Tensor],
    ids: npt.NDArray[np.integer[Any]],
    *,
    uniforms: npt.NDArray[np.float32] | None,
    xtc_uniforms: npt.NDArray[np.float32] | None,
) -> Trace:
    """The answer to a sampler case.

    Args:
        rows: The rows that were drawn from, each [1, V] in the case's dtype.
        ids: [num_steps, batch].
        uniforms: [num_steps, batch]: the uniform behind each id; None when greedy. Of a batch of one: what the cumulative
            sum was walked to; of several rows: what became the Gumbel noise of the id.
        xtc_uniforms: [num_steps]; None where XTC is not active.

    Returns:
        `logits/<row>`, `uniforms`, `xtc_uniforms` and `token_ids`, the ids of each draw side by side.
    """
    tensors = {logits_name(index): row for index, row in enumerate(rows)}
    if uniforms is not None:
        tensors[UNIFORMS] = Tensor.of(uniforms.astype("<f4"))
    if xtc_uniforms is not None:
        tensors[XTC_UNIFORMS] = Tensor.of(xtc_uniforms.astype("<f4"))
    tensors[TOKEN_IDS] = Tensor.of(ids.reshape(-1).astype("<i4"))
    return Trace(tensors=tensors)
