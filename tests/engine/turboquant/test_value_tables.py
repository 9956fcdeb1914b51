"""The frozen tables are the published ones where there are any, and what their rule makes where it can be run again."""

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.turboquant.value_tables import CENTROIDS, boundaries, centroids


def lloyd(bits: int) -> npt.NDArray[np.float32]:
    """The rule: means summed in double, centroids and boundaries in float32, from an even spread."""
    samples = np.sort(np.array(mx.random.normal((200_000,), key=mx.random.key(0))))
    sums = np.concatenate([[0.0], np.cumsum(samples, dtype=np.float64)])
    table = np.linspace(samples[0], samples[-1], 2**bits, dtype=np.float32)
    for _ in range(500):
        middle = (table[:-1] + table[1:]) * np.float32(0.5)
        ends = np.concatenate([[0], np.searchsorted(samples, middle, side="right"), [samples.size]])
        counts = np.diff(ends)
        means = (sums[ends[1:]] - sums[ends[:-1]]) / np.maximum(counts, 1)
        table = np.where(counts > 0, means, table).astype(np.float32)
    return table


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_frozen_table_is_what_the_rule_comes_to(bits: int) -> None:
    assert np.max(np.abs(lloyd(bits) - np.array(centroids(bits)))) < 1e-6


def test_the_2_bit_table_is_the_published_one() -> None:
    assert np.round(np.array(centroids(2)), 6).tolist() == pytest.approx([-1.514475, -0.458225, 0.448632, 1.512152])
    assert np.array(boundaries(2)).tolist() == pytest.approx([-0.986350, -0.004796, 0.980392], abs=6e-7)


def test_the_3_bit_table_is_the_published_one() -> None:
    table = [-2.15195, -1.34391, -0.75601, -0.24509, 0.24509, 0.75601, 1.34391, 2.15195]
    assert np.array_equal(np.array(centroids(3)), np.array(table, dtype=np.float32))
    middle = [-1.74793, -1.04996, -0.50055, 0, 0.50055, 1.04996, 1.74793]
    assert np.array_equal(np.array(boundaries(3)), np.array(middle, dtype=np.float32))


def test_the_outer_4_bit_centroids_are_the_published_ones() -> None:
    assert np.array(centroids(4))[[0, -1]].tolist() == pytest.approx([-2.765663, 2.720728], abs=5e-7)


@pytest.mark.parametrize("bits", CENTROIDS)
def test_tables_ascend_and_boundaries_lie_between(bits: int) -> None:
    table, middle = np.array(centroids(bits)), np.array(boundaries(bits))
    assert (table.size, middle.size) == (2**bits, 2**bits - 1)
    assert np.all(table[:-1] < middle)
    assert np.all(middle < table[1:])
