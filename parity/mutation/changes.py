"""Small wrong values: from what an engine holds to what it might hold by mistake.

Each is a function of numbers that returns a function of the right value. Arrays keep dtype and shape unless the name says
otherwise; nothing is changed in place.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

Change = Callable[[Any], Any]
WORDS = {1: (mx.uint8, np.uint8), 2: (mx.uint16, np.uint16), 4: (mx.uint32, np.uint32)}


def times(factor: float) -> Change:
    """A factor too much."""
    return lambda value: value * factor


def plus(amount: float) -> Change:
    """A summand too much."""
    return lambda value: value + amount


def to(value: object) -> Change:
    """Another value, whatever was there."""
    return lambda _: value


def fields(**changes: Change) -> Change:
    """The same dataclass with some fields changed."""
    return lambda value: replace(value, **{name: change(getattr(value, name)) for name, change in changes.items()})


def one_ulp(*index: int) -> Change:
    """One element's stored word plus one: of a float its neighbour away from zero, of packed words the first element's."""

    def change(array: Any) -> Any:  # noqa: ANN401 - an mx.array
        wide, narrow = WORDS[array.dtype.size]
        words = np.array(array.view(wide)).astype(narrow)
        words[index or (0,) * words.ndim] += narrow(1)
        return mx.array(words).view(array.dtype)

    return change


def rounded(dtype: mx.Dtype) -> Change:
    """Through a narrower dtype and back."""
    return lambda array: array.astype(dtype).astype(array.dtype)


def exchanged(first: int, second: int, axis: int = 0) -> Change:
    """Two entries along an axis, or of a tuple, in each other's place."""

    def change(value: Any) -> Any:  # noqa: ANN401 - an mx.array or a tuple
        order = list(range(len(value) if isinstance(value, tuple) else value.shape[axis]))
        order[first], order[second] = order[second], order[first]
        if isinstance(value, tuple):
            return tuple(value[i] for i in order)
        return mx.take(value, mx.array(order), axis=axis)

    return change


def rolled(by: int, axis: int = 0) -> Change:
    """Every entry along an axis moved on."""
    return lambda array: mx.roll(array, by, axis)
