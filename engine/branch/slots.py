"""A table of values behind handles that go stale safely.

A handle is a number: generation times 65,536 plus the place. A place that is given free changes its generation, so an old
handle finds nothing, however often the place is used again; 0 is never a handle.

Guarantees: a handle finds exactly the value that it was given out for, or is refused. Places are reused last in, first out.
Source: spec/kv.md section 14.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from engine.errors import RequestError

FIRST: Final = 16  # places at first
MOST: Final = 65_536  # places at most, place 0 included
PLACES: Final = 1 << 16
GENERATIONS: Final = 1 << 32

Value = TypeVar("Value")


class StaleHandleError(RequestError):
    """The handle's branch is gone, or never was."""

    kind = "stale_handle"


@dataclass(slots=True)
class Slots(Generic[Value]):
    """The table; it grows by doubling.

    Attributes:
        most: Places at most, place 0 included.
    """

    most: int = MOST
    _values: list[Value | None] = field(default_factory=lambda: [None] * FIRST)
    _generations: list[int] = field(default_factory=lambda: [1] * FIRST)
    _free: list[int] = field(default_factory=lambda: list(range(FIRST - 1, 0, -1)))

    def __post_init__(self) -> None:
        """Refuse a size that has no room for a value.

        Raises:
            RequestError: It is below 2 or above 65,536.
        """
        if not 2 <= self.most <= MOST:
            raise RequestError(
                "no such number of slots", given=self.most, known=f"2 to {MOST}", next_step="choose one of these"
            )
        del self._values[self.most :], self._generations[self.most :]
        self._free = [place for place in self._free if place < self.most]

    def __len__(self) -> int:
        return sum(value is not None for value in self._values)

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, int) and self._place(handle) is not None

    @property
    def available(self) -> int:
        """Values that can still be added."""
        return self.most - 1 - len(self)

    def handles(self) -> Iterator[int]:
        """Handles of all values, by place."""
        for place, value in enumerate(self._values):
            if value is not None:
                yield self._generations[place] * PLACES + place

    def add(self, value: Value) -> int:
        """Keep a value; its handle.

        Raises:
            RequestError: Every place is taken.
        """
        if not self._free:
            self._grow()
        place = self._free.pop()
        self._values[place] = value
        return self._generations[place] * PLACES + place

    def get(self, handle: int) -> Value:
        """The value of a handle.

        Raises:
            StaleHandleError: It is gone, or never was.
        """
        place = self._place(handle)
        value = None if place is None else self._values[place]
        if value is None:
            raise StaleHandleError(
                "the branch is gone",
                handle=f"place {handle % PLACES}, generation {handle // PLACES}",
                live=len(self),
                next_step="use the handle that opening or forking it gave last",
            )
        return value

    def put(self, handle: int, value: Value) -> None:
        """Replace the value of a handle.

        Raises:
            StaleHandleError: It is gone, or never was.
        """
        self.get(handle)
        self._values[handle % PLACES] = value

    def release(self, handle: int) -> Value:
        """Give a place free; every handle to it is stale from now on.

        Raises:
            StaleHandleError: It is gone already, or never was.
        """
        value, place = self.get(handle), handle % PLACES
        self._values[place] = None
        self._generations[place] = self._generations[place] % (GENERATIONS - 1) + 1  # never 0: handle 0 finds nothing
        self._free.append(place)
        return value

    def _place(self, handle: int) -> int | None:
        place = handle % PLACES
        if handle <= 0 or place >= len(self._values) or self._generations[place] != handle // PLACES:
            return None
        return None if self._values[place] is None else place

    def _grow(self) -> None:
        old = len(self._values)
        if old == self.most:
            raise RequestError("every slot is taken", slots=self.most - 1, next_step="prune branches first")
        new = min(2 * old, self.most)
        self._values += [None] * (new - old)
        self._generations += [1] * (new - old)
        self._free += range(new - 1, old - 1, -1)
