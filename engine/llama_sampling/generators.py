"""Random generators of the family: mt19937 as llama.cpp's C++ library uses it, and xoroshiro128+.

Guarantees: a seed gives the same numbers on every platform; seed 0 is a seed like any other. A generator is the one mutable
thing of the package; `clone` gives one that continues independently from the same place.
"""

from typing import Any, Final, Protocol, Self, cast

import numpy as np

from engine.errors import RequestError

RANDOM_SEED: Final = 2**32 - 1  # asks llama.cpp for a seed that nobody knows
_MASK: Final = 2**64 - 1
_BELOW_ONE: Final = np.nextafter(np.float32(1), np.float32(0))


class Generator(Protocol):
    """A source of uniform numbers in [0, 1)."""

    def next_double(self) -> float:
        """The next double."""
        ...

    def next_float(self) -> np.float32:
        """The next float32."""
        ...

    def clone(self) -> Self:
        """A generator at the same place that moves by itself from here."""
        ...


class Mt19937:
    """The 32-bit Mersenne Twister with the mappings to [0, 1) of GNU's C++ library.

    A double takes two outputs, low word first, over 2^64; a float takes one over 2^32. numpy's own `random_sample` takes its
    bits otherwise, so only its raw outputs are used.

    Source: spec/samplers.md section 3.5.
    """

    def __init__(self, seed: int) -> None:
        """Start at a seed.

        Raises:
            RequestError: It is not a 32-bit number, or the one that asks llama.cpp for a random seed.
        """
        _check_seed(seed, bits=32)
        if seed == RANDOM_SEED:
            raise RequestError(
                f"seed {RANDOM_SEED} asks llama.cpp for a random seed, so no run can be repeated",
                next_step=f"choose a seed from 0 to {RANDOM_SEED - 1}",
            )
        self._bits = np.random.MT19937()
        self._bits.state = cast(
            "Any", np.random.RandomState(seed).get_state(legacy=False)
        )  # numpy types it as a plain dict

    def next_raw(self) -> int:
        """The next 32-bit output."""
        return int(self._bits.random_raw())

    def next_double(self) -> float:
        """The next double, from two outputs.

        Numerics: the sum of both words rounds to double once; a result of 1 becomes the double below.
        """
        low, high = self.next_raw(), self.next_raw()
        return min((float(low) + high * 2.0**32) * 2.0**-64, 1.0 - 2.0**-53)

    def next_float(self) -> np.float32:
        """The next float32, from one output, rounded to nearest; a result of 1 becomes the float32 below."""
        return min(np.float32(self.next_raw()) * np.float32(2.0**-32), _BELOW_ONE)

    def clone(self) -> Self:
        """A generator at the same place."""
        twin = type(self)(0)
        twin._bits.state = self._bits.state  # noqa: SLF001 - another one of this class
        return twin


class Xoroshiro128Plus:
    """xoroshiro128+ with rotations 24, 16, 37, seeded through splitmix64.

    A double is the top 53 bits of an output; a float32, which no source fixes, is its top 24 bits.

    Source: spec/samplers.md section 3.5; Blackman and Vigna, "Scrambled Linear Pseudorandom Number Generators", 2021.
    """

    def __init__(self, seed: int) -> None:
        """Start at a seed.

        Raises:
            RequestError: It is not a 64-bit number.
        """
        _check_seed(seed, bits=64)
        self.state = (_splitmix64(seed, 1), _splitmix64(seed, 2))

    def next_raw(self) -> int:
        """The next 64-bit output."""
        s0, s1 = self.state
        mixed = s0 ^ s1
        self.state = (_rotated(s0, 24) ^ mixed ^ (mixed << 16 & _MASK), _rotated(mixed, 37))
        return (s0 + s1) & _MASK

    def next_double(self) -> float:
        """The next double, from the top 53 bits of one output."""
        return (self.next_raw() >> 11) * 2.0**-53

    def next_float(self) -> np.float32:
        """The next float32, from the top 24 bits of one output."""
        return np.float32((self.next_raw() >> 40) * 2.0**-24)

    def clone(self) -> Self:
        """A generator at the same place."""
        twin = type(self)(0)
        twin.state = self.state
        return twin


def _check_seed(seed: int, *, bits: int) -> None:
    if type(seed) is not int or not 0 <= seed < 2**bits:
        raise RequestError(
            "a seed is out of range", given=seed, range=f"0 to 2^{bits} - 1", next_step="choose another seed"
        )


def _splitmix64(seed: int, index: int) -> int:
    """The output of splitmix64 number `index`, counted from 1."""
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _rotated(word: int, count: int) -> int:
    return (word << count | word >> (64 - count)) & _MASK
