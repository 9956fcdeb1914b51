"""What a batch case asks beside its logits: sequences that share forwards, of what lengths, when they join and leave.

The case's `prompt_ids`, `forced_ids` and `num_steps` are those of all sequences, one after the other; so are the rows of its
trace: row `k` is step `k - first` of the sequence whose rows begin at `first`. A sequence leaves when it has its rows.

How the prompts are brought side by side is a different computation each time, though a mask hides the padding:

- `left`: padded at their left into one block, which is fed as the case's feed says.
- `right`: as mlx-lm's batched loop does: all but each prompt's last token, padded at the right, in pieces; the padding is
  rolled to the left; then the last tokens. Sequences may join later.
- `merged`: each prompt but its last token alone, then their caches side by side; then the last tokens. They may join later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, cast, get_args

from parity.errors import CaseError

Fill = Literal["left", "right", "merged"]
FILLS: Final = get_args(Fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of a batch case.

    Attributes:
        fill: How the prompts are brought side by side.
        lengths: Tokens of each prompt.
        steps: Rows of logits of each sequence.
        joins: Turns of the loop that are over when each sequence comes in; all 0 of `left`.
    """

    fill: Fill
    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    joins: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what no loop could run."""
        same = len(self.lengths) == len(self.steps) == len(self.joins) > 0
        if (
            not same
            or self.fill not in FILLS
            or min(*self.lengths, *self.steps) < 1
            or min(self.joins) < 0
            or (self.fill == "left" and any(self.joins))
        ):
            raise CaseError(
                "a batch does not fit together",
                fill=self.fill,
                lengths=list(self.lengths),
                steps=list(self.steps),
                joins=list(self.joins),
                next_step=f"give one of each a sequence, of at least 1, 1 and 0; fill is one of {', '.join(FILLS)};"
                " prompts padded at their left begin together",
            )

    def prompts(self, prompt_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The case's `prompt_ids`, a prompt a sequence."""
        return _cut(prompt_ids, self.lengths)

    def forced(self, forced_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The case's `forced_ids`, a list a sequence."""
        return _cut(forced_ids, self.steps)

    def row(self, sequence: int, step: int) -> int:
        """Number of a sequence's row in the trace."""
        return sum(self.steps[:sequence]) + step

    def place(self, row: int) -> tuple[int, int]:
        """Sequence and step of a row of the trace."""
        for sequence, steps in enumerate(self.steps):
            if row < steps:
                return sequence, row
            row -= steps
        raise IndexError(row)

    def rows(self) -> Iterator[tuple[int, int]]:
        """Sequence and step of every row, in the trace's order."""
        return ((sequence, step) for sequence, steps in enumerate(self.steps) for step in range(steps))

    def to_json(self) -> dict[str, object]:
        """Plain values, in a fixed order."""
        return {
            "fill": self.fill,
            "lengths": list(self.lengths),
            "steps": list(self.steps),
            "joins": list(self.joins),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            CaseError: It does not fit together.
            KeyError, TypeError: A field is missing or unknown.
        """
        if unknown := set(raw) - {"fill", "lengths", "steps", "joins"}:
            raise TypeError(f"unknown: {', '.join(sorted(unknown))}")
        return cls(
            fill=cast("Fill", raw["fill"]),
            lengths=tuple(raw["lengths"]),
            steps=tuple(raw["steps"]),
            joins=tuple(raw["joins"]),
        )


def _cut(ids: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(tuple(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True))
