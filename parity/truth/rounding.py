"""Arithmetic of a truth: exact, or with the rounding of a dtype put in at random.

A truth that is run a few times with random rounding spreads as far as any honest computation in that dtype may lie from the
exact one: the rounding bound is measured, not derived (stochastic arithmetic, Vignes 1993). Guarantees: seeded, so that a
bound is the same every time; every perturbation is at most what the dtype's rounding can do at that place.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from parity.case import DType
from parity.truth.weights import Array

UNIT: Final = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}  # half a unit in the last place, relative
CODE: Final = (
    3e-4  # of a step between two codes: more than float32 moves an element, so that every sample flips a few codes
)
ANGLE: Final = 4 * UNIT["f32"]  # a period comes from exp and log in float32, an angle from one more product


class Rounding(Protocol):
    """What happens to a result."""

    def value(self, y: Array) -> Array:
        """A result of one operation, rounded."""
        ...

    def product(self, y: Array, size: Array | None, *, packed: bool) -> Array:
        """A matrix product, whose sums round term by term; `size` is the product of the magnitudes."""
        ...

    def angle(self, y: Array) -> Array:
        """Angles of a rotation, which are float32 in every run."""
        ...

    def code(self, y: Array) -> Array:
        """Codes of packed elements, before they are rounded to whole ones."""
        ...

    @property
    def wants_size(self) -> bool:
        """Whether `product` needs the product of the magnitudes."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """No rounding beyond float64's own."""

    wants_size: bool = False

    def value(self, y: Array) -> Array:
        """As it is."""
        return y

    def product(self, y: Array, size: Array | None, *, packed: bool) -> Array:
        """As it is."""
        del size, packed
        return y

    def angle(self, y: Array) -> Array:
        """As it is."""
        return y

    def code(self, y: Array) -> Array:
        """As they are."""
        return y


@dataclass(slots=True)
class Random:
    """Rounding of a dtype at random, evenly spread.

    Args:
        dtype: Of the run.
        seed: Of the generator.
    """

    dtype: DType
    seed: int
    wants_size: bool = True
    _generator: np.random.Generator | None = None

    def value(self, y: Array) -> Array:
        """Off by at most the dtype's rounding, relative to the result."""
        return y * (1 + UNIT[self.dtype] * self._spread(y.shape))

    def product(self, y: Array, size: Array | None, *, packed: bool) -> Array:
        """Off by the rounding of the sum, in proportion to the magnitudes summed, then rounded.

        Sums of dense products are float32 whatever the dtype; those of packed weights round to the dtype at every term.
        """
        unit = UNIT[self.dtype] if packed else UNIT["f32"]
        summed = y if size is None else y + unit * size * self._spread(y.shape)
        return self.value(summed)

    def angle(self, y: Array) -> Array:
        """Off by what float32 does to a period and to its product with a position."""
        return y * (1 + ANGLE * self._spread(y.shape))

    def code(self, y: Array) -> Array:
        """Off by a little of a step: elements that lie near the middle between two codes take either."""
        return y + CODE * self._spread(y.shape)

    def _spread(self, shape: tuple[int, ...]) -> Array:
        if self._generator is None:
            self._generator = np.random.default_rng(self.seed)
        return self._generator.uniform(-1.0, 1.0, shape)
