"""Two runs of one machine: how each figure changed, and whether that is more than noise.

What is compared is the ratio to the peer, because both sides of it saw the same minutes. The interval of a change is as wide as
the two measured intervals allow: from the later run's lowest ratio over the earlier run's highest to the reverse. A change
is called one only where that interval leaves 1 out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bench.history import Run

SMALLER_IS_BETTER: Final = frozenset({"s", "MiB"})
Word = Literal["faster", "slower", "less", "more", "within noise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure in two runs.

    Attributes:
        name: Of the figure.
        peer: Beside whom it was measured.
        unit: Of its values.
        before: Ratio to the peer in the earlier run.
        after: In the later one.
        change: after / before.
        low: The least that the measured intervals allow.
        high: The most.
    """

    name: str
    peer: str
    unit: str
    before: float
    after: float
    change: float
    low: float
    high: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether 1 lies outside the interval."""
        return self.low > 1 or self.high < 1

    @property
    def is_worse(self) -> bool:
        """Whether it is beyond noise, and in the wrong direction."""
        return self.is_beyond_noise and (self.change > 1) == (self.unit in SMALLER_IS_BETTER)

    @property
    def word(self) -> Word:
        """What became of it."""
        if not self.is_beyond_noise:
            return "within noise"
        if self.unit == "MiB":
            return "more" if self.change > 1 else "less"
        return "slower" if self.is_worse else "faster"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "peer": self.peer,
            "unit": self.unit,
            "before": self.before,
            "after": self.after,
            "change": self.change,
            "low": self.low,
            "high": self.high,
            "word": self.word,
        }


def compare(before: Run, after: Run) -> tuple[list[Change], list[str]]:
    """Changes of the figures that both runs have, in the later one's order, and the names that only one of them has."""
    earlier, later = _by_name(before), _by_name(after)
    changes = []
    for key, new in later.items():
        if key in earlier:
            old = earlier[key]
            changes.append(
                Change(
                    name=key[0],
                    peer=key[1],
                    unit=new["unit"],
                    before=old["ratio"],
                    after=new["ratio"],
                    change=new["ratio"] / old["ratio"],
                    low=new["low"] / old["high"],
                    high=new["high"] / old["low"],
                )
            )
    return changes, sorted({f"{name} beside {peer}" for name, peer in earlier.keys() ^ later.keys()})


def _by_name(run: Run) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(figure["name"], figure["peer"]): figure for figure in run.figures}
