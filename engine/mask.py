"""Which positions a query may attend to."""

from typing import Literal

import mlx.core as mx

Mask = Literal["causal"] | mx.array | None


def causal_matrix(L: int, *, before: int, window: int | None = None) -> mx.array:
    """Boolean [L, before + L], True where query i (at position before + i) may attend to key j.

    Args:
        L: New positions.
        before: Positions that precede them.
        window: A query sees at most this many positions, itself included; all earlier ones where absent.

    Source: spec/kv.md section 1.
    """
    query = mx.arange(before, before + L)[:, None]
    key = mx.arange(before + L)[None]
    allowed = query >= key
    return allowed if window is None else allowed & (query < key + window)
