"""Which position of a prompt differs first.

A trace records the last position alone; a prompt cut short makes any position the last. The shortest prompt that differs while
the one that is a token shorter does not names the position, and the modules of its trace are those of that position.
Guarantees: both halves of that statement were run. It supposes that a longer prompt does not hide what a shorter one shows,
and finds the boundary by a few rounds of a few prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from parity.case import Case
from parity.explaining.cause import Sighting
from parity.explaining.runs import run_all
from parity.localize import Place, localize
from parity.snapshot import Snapshot
from parity.trace import Runner, Trace

AT_ONCE: Final = 6  # prompts a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortest:
    """The shortest prompt that differs.

    Attributes:
        case: That prompt, one step.
        place: Where its traces part.
        expected: Its trace on the expected side.
        actual: On the actual side.
    """

    case: Case
    place: Place
    expected: Trace
    actual: Trace

    @property
    def sighting(self) -> Sighting:
        """As evidence of a cause."""
        return Sighting(place=self.place, expected=self.expected, actual=self.actual, ids=self.case.prompt_ids)


def prefix(case: Case, length: int) -> Case:
    """The first `length` tokens of a case's prompt and the one row that follows them."""
    return replace(case, prompt_ids=case.prompt_ids[:length], forced_ids=None, num_steps=1)


def shortest_prompt(
    case: Case, snapshot: Snapshot, expected: Runner, actual: Runner, *, head_width: int | None = None
) -> Shortest | None:
    """Find the shortest prompt of a case that differs at its last position; None where none does.

    Args:
        case: Whose whole prompt is known to differ; it says what is recorded.
        snapshot: What both sides run.
        expected: One side.
        actual: The other.
        head_width: As of `localize`.
    """
    low, high = (
        0,
        len(case.prompt_ids),
    )  # a prompt of `low` tokens does not differ; one of `high` does, once `found` says so
    found: Shortest | None = None
    while found is None or high - low > 1:
        lengths = _between(low, high, include_high=found is None)
        asked = [prefix(case, length) for length in lengths]
        pairs = zip(asked, run_all(expected, asked, snapshot), run_all(actual, asked, snapshot), strict=True)
        for length, (short, want, got) in zip(lengths, pairs, strict=True):
            place = localize(want, got, head_width=head_width)
            if place is not None and length <= high:
                found, high = Shortest(case=short, place=place, expected=want, actual=got), length
                break
            low = length
        else:
            if found is None:
                return None
    return found


def _between(low: int, high: int, *, include_high: bool) -> Sequence[int]:
    """A few lengths above `low`, evenly spread, up to `high`."""
    last = high if include_high else high - 1
    count = min(AT_ONCE, last - low)
    return sorted({low + round((i + 1) * (last - low) / count) for i in range(count)})
