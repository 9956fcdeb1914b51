"""Where the random keys of draws come from: one stream, or a counter a step.

A key is two 32-bit words, an mx.array of uint32 [2]. Both sources are values: taking keys gives the source that follows, so
a sequence can be continued, repeated or forked from any point, and no global state is read or written.

Source: spec/samplers.md section 1.4, spec/oracles.md section 5.
"""

from dataclasses import dataclass
from typing import Final, Protocol, Self

import mlx.core as mx

from engine.errors import RequestError

WORD: Final = 1 << 64
GOLDEN_RATIO: Final = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd: steps land far apart


class KeySource(Protocol):
    """Gives the keys of one token, and itself as it stands afterwards."""

    def take(self, count: int) -> tuple[tuple[mx.array, ...], Self]:
        """`count` keys [2] for the draws of one token, in the order in which they are used."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequentialKeys:
    """The stream that `mx.random.seed` starts: every draw consumes the next key, whoever makes it.

    Attributes:
        state: What the stream has come to, uint32 [2].
    """

    state: mx.array

    @classmethod
    def of(cls, seed: int) -> Self:
        """The stream of a seed; 0 is one like any other.

        Raises:
            RequestError: The seed is not a whole number of 64 bits.
        """
        return cls(state=mx.random.key(checked_seed(seed)))

    def take(self, count: int) -> tuple[tuple[mx.array, ...], "SequentialKeys"]:
        """The next keys, and the stream after them."""
        state, keys = self.state, []
        for _ in range(count):
            pair = mx.random.split(state)
            state = pair[0]
            keys.append(pair[1])
        return tuple(keys), SequentialKeys(state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterKeys:
    """A key computed from seed and step alone: what was drawn before, and in which order, does not matter.

    Attributes:
        seed: 64 bits.
        step: Index of the token to be drawn; 0 follows the prompt.
    """

    seed: int
    step: int = 0

    def __post_init__(self) -> None:
        """Refuse a seed that is not 64 bits and a step before the first.

        Raises:
            RequestError: Either is so.
        """
        checked_seed(self.seed)
        if self.step < 0:
            raise RequestError("a step before the first has no key", step=self.step, next_step="count steps from 0")

    @property
    def word(self) -> int:
        """The 64-bit word that becomes the key."""
        return self.seed ^ ((self.step + 1) * GOLDEN_RATIO % WORD)

    def take(self, count: int) -> tuple[tuple[mx.array, ...], "CounterKeys"]:
        """The step's key itself where one is needed, else the parts that it splits into; and the source of the next step."""
        key = mx.random.key(self.word)
        keys = (key,) if count == 1 else tuple(mx.random.split(key, count))
        return keys, CounterKeys(seed=self.seed, step=self.step + 1)


def checked_seed(seed: int) -> int:
    """The seed, if it is one.

    Raises:
        RequestError: It is not a whole number from 0 to 2**64 - 1.
    """
    if type(seed) is not int or not 0 <= seed < WORD:
        raise RequestError(
            "not a seed", given=repr(seed), known="0 to 2**64 - 1", next_step="use a whole number of 64 bits"
        )
    return seed
