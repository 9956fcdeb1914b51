"""Medians, spread, and a ratio with an interval that assumes nothing about the noise.

A ratio is taken within each pair of neighbouring measurements, so slow drifts of the machine cancel. The interval is the
smallest and the largest of the paired ratios: whatever the distribution, the true median lies outside it with probability
2 * (1/2)**n for n pairs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and extremes of repeated measurements, in their own unit."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Summarise at least one value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values), count=len(values))


def paired_ratio(engine: Sequence[float], peer: Sequence[float]) -> Spread:
    """Spread of engine / peer over pairs.

    Args:
        engine: One value a pair.
        peer: The neighbouring value, positive.
    """
    return spread([e / p for e, p in zip(engine, peer, strict=True)])
