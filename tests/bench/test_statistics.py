"""Ratios are paired, and their interval is what the pairs span."""

import pytest

from bench.statistics import paired_ratio, spread


def test_a_ratio_is_taken_within_pairs() -> None:
    ratio = paired_ratio(engine=[10.0, 40.0, 30.0], peer=[5.0, 10.0, 10.0])

    assert (ratio.median, ratio.low, ratio.high, ratio.count) == (3.0, 2.0, 4.0, 3)


def test_a_drift_that_hits_both_sides_leaves_the_ratio_alone() -> None:
    drift = [1.0, 2.0, 4.0]

    ratio = paired_ratio(engine=[6 * d for d in drift], peer=[3 * d for d in drift])

    assert (ratio.low, ratio.high) == (2.0, 2.0)


def test_unpaired_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio(engine=[1.0, 2.0], peer=[1.0])


def test_a_spread_keeps_the_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]).high == 3.0
    assert spread([3.0, 1.0, 2.0]).low == 1.0
