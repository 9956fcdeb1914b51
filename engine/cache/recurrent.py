"""The recurrent cache: a fixed number of arrays that a layer rewrites at every forward.

Convolution windows, states of a scan, the state matrix of a delta rule: what the arrays mean is the layer's business.
There are no positions to pack, to trim or to share.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import Cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrentCache:
    """A layer's state.

    Attributes:
        state: One array or None (before the first forward) a slot.
        offset: Tokens ever seen.
    """

    state: tuple[mx.array | None, ...]
    offset: int = 0

    @classmethod
    def empty(cls, slots: int) -> "RecurrentCache":
        """A cache of `slots` arrays that are not there yet."""
        return cls(state=(None,) * slots)

    @property
    def kind(self) -> str:
        """Such as `arrays-2`."""
        return f"arrays-{len(self.state)}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that are there."""
        return tuple(array for array in self.state if array is not None)

    def advanced(self, *state: mx.array | None, by: int) -> "RecurrentCache":
        """The cache after `by` more tokens, with a new array (or None) in every slot."""
        if len(state) != len(self.state):
            raise ValueError(f"{len(state)} arrays for {len(self.state)} slots")
        return replace(self, state=state, offset=self.offset + by)


def as_recurrent(cache: Cache) -> RecurrentCache:
    """The same cache, known to hold a layer's state.

    Raises:
        TypeError: It does not; the family handed a layer the wrong kind.
    """
    if not isinstance(cache, RecurrentCache):
        raise TypeError(f"a recurrent layer was handed a cache of kind {cache.kind}")
    return cache
