"""Running parts of a step by themselves, on random and special values, to be held to mlx.

Guarantees: what a part reads and writes lives as long as the bench; values are those of a seed.
"""

from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.kernels import fields as f
from engine.kernels.blocks import address_of
from engine.kernels.driver import NAN, SLOTS
from engine.kernels.history import Floats, aligned
from engine.kernels.part_words import words_of
from engine.kernels.step import StepCode
from engine.kernels.team import Team
from engine.kernels.tile import STORED
from engine.kernels.verify import DTYPES, sprinkled

FAINT: Final = np.float32(2.0**-64)  # products of such values are subnormal
SLACK: Final = 3  # floats that a row of sums is wider than what is in it

Result = tuple[str, mx.array, mx.array, bool]  # what it is, mlx's, the part's, whether it marked a NaN


class PartBench:
    """Buffers and a context for parts that are run by themselves."""

    def __init__(self, code: StepCode, dtype: str, threads: int) -> None:
        self.code = code
        self.dtype = DTYPES[dtype]
        self.context = np.zeros(f.CONTEXT_WORDS, np.int64)
        self.context[f.ROUNDING] = STORED.index(dtype)
        self.team = Team(threads=threads)
        self.held: list[Any] = []
        self._buffers: dict[int, Floats] = {}

    def keep(self, array: Floats) -> int:
        """Address of an array that lives as long as this does."""
        self.held.append(array)
        return address_of(array)

    def buffer(self, word: int, values: Floats) -> Floats:
        """A buffer with values in it."""
        copy = aligned(values.size)
        copy[:] = values.reshape(-1)
        self.context[word] = self.keep(copy)
        self._buffers[word] = copy
        return copy.reshape(values.shape)

    def held_at(self, word: int) -> Floats:
        """What a buffer holds now, flat."""
        return self._buffers[word]

    def run(self, *parts: dict[int, int]) -> bool:
        """Run parts in turn; whether one marked a NaN."""
        program = np.array([words_of(part) for part in parts], np.int64)
        control = np.zeros((len(parts), SLOTS), np.int64)
        context = self.context.copy()

        def work(_: int) -> int:
            return int(self.code.run(address_of(program), len(parts), address_of(context), address_of(control)))

        self.team.run(work, len(parts), threads=self.team.threads)
        return bool(control[:, NAN].any())

    def stored(self, array: Floats) -> mx.array:
        """A buffer in the dtype of the activations; in float32, which equals nothing, where an element was not rounded."""
        wide = mx.array(np.ascontiguousarray(array))
        narrow = wide.astype(self.dtype)
        return narrow if mx.array_equal(narrow.astype(mx.float32), wide, equal_nan=True) else wide


def drawn(random: np.random.Generator, special: str, *shape: int) -> Floats:
    """Float32 values, special ones among them, or all of them faint."""
    values = sprinkled(random, shape, special)
    return values * FAINT if special.startswith("faint") else values


def as_stored(values: Floats, dtype: mx.Dtype) -> mx.array:
    """Values in the dtype of the activations."""
    return mx.array(values).astype(dtype)
