"""Invariances of sampling filters: a row in a batch = alone, and no dependence on how the vocabulary is ordered.

A filter that keeps another set of ids when the ids are renumbered breaks ties by position, and one whose rows look at each
other mixes requests. Rows are generated: Gaussian, peaked, and with many ties.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from parity.logit_rows import rounded
from parity.sweeping.outcome import Pair
from parity.sweeping.rows import part
from parity.sweeping.subject import Subject
from parity.tensor import Tensor

FILTERS: Final[Mapping[str, Mapping[str, float]]] = {
    "top_k": {"k": 20},
    "top_p": {"p": 0.9},
    "min_p": {"min_p": 0.05},
    "xtc": {"probability": 1.0, "threshold": 0.05},
}
ORDER_FREE: Final = ("top_p", "min_p", "xtc")  # top_k must break ties somehow: it keeps exactly k
WIDTH: Final = 256


def row_is_alone(subject: Subject, name: str, dtype: str) -> Iterator[Pair]:
    """A row's filtered logits do not depend on the rows beside it."""
    rows = filter_rows(dtype)
    together = subject.filtered(name, rows, FILTERS[name])
    for row in range(rows.shape[0]):
        own = subject.filtered(name, part(rows, slice(row, row + 1)), FILTERS[name])
        yield Pair(label=f"row {row}", expected=part(own, 0), actual=part(together, row))


def ids_may_be_renumbered(subject: Subject, name: str, dtype: str) -> Iterator[Pair]:
    """Filtering the renumbered row = renumbering the filtered row."""
    rows = filter_rows(dtype)
    order = np.argsort(np.random.PCG64(7).random_raw(WIDTH), kind="stable")
    for row in range(rows.shape[0]):
        one = part(rows, slice(row, row + 1))
        expected = _renumbered(subject.filtered(name, one, FILTERS[name]), order)
        actual = subject.filtered(name, _renumbered(one, order), FILTERS[name])
        yield Pair(label=f"row {row}", expected=expected, actual=actual)


def filter_rows(dtype: str) -> Tensor:
    """Log-probabilities [4, 256] rounded to `dtype`: broad, peaked, tied in steps of a quarter, and one almost certain."""
    words = np.random.PCG64(11).random_raw(4 * WIDTH * 3).astype("<u8").view("<u2").reshape(4, WIDTH, 12)
    normal = (words.sum(axis=-1).astype(np.float64) - 12 * 65535 / 2) / 65536
    normal[1] *= 4
    normal[2] = np.round(normal[2] * 4) / 4
    normal[3] *= 8
    log_sum = np.log(np.exp(normal).sum(axis=-1, keepdims=True))
    logprobs: npt.NDArray[np.float32] = (normal - log_sum).astype(np.float32)
    given = rounded(logprobs, dtype)  # type: ignore[arg-type]
    return Tensor(dtype=given[0].dtype, shape=logprobs.shape, data=b"".join(row.data for row in given))


def _renumbered(rows_BV: Tensor, order: npt.NDArray[np.int64]) -> Tensor:
    words = rows_BV.bits()[:, order]
    return Tensor(dtype=rows_BV.dtype, shape=words.shape, data=np.ascontiguousarray(words).tobytes())
