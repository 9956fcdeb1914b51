"""What the tests of sampling share: rows whose probabilities are known."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest


@pytest.fixture(scope="session")
def log_odds() -> Callable[..., mx.array]:
    """A row [1, V] of log-probabilities, float32."""

    def make(*shares: float) -> mx.array:
        return mx.array(np.log(np.array([shares], np.float64)).astype(np.float32))

    return make


@pytest.fixture(scope="session")
def kept() -> Callable[[mx.array], list[list[int]]]:
    """Ids of each row that are not ruled out."""

    def ids(rows: mx.array) -> list[list[int]]:
        values = np.array(rows.astype(mx.float32))
        return [np.flatnonzero(~np.isneginf(row)).tolist() for row in values]

    return ids
