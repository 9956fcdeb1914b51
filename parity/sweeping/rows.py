"""Slices of logits as tensors, and the prompts, padding and penalty that every sweep uses.

Guarantees: a slice keeps the bits and the dtype; prompts are drawn from a seed that is a name, the same on every machine.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from parity.sweeping.subject import State, Subject
from parity.tensor import Tensor

LENGTHS: Final = (40, 23, 31)  # past the window of 16 that tiny configs have, and no two alike
STEPS: Final = 3
PAD: Final = 5  # a token like any other: 0 would hide what a state makes of it
PENALTY: Final = 1.5  # of repetition, alike on every side
REACH: Final = 64  # tokens that the penalty looks back


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What is fed.

    Attributes:
        first: 40 ids.
        all: `first` and two shorter ones.
        equal: Three of 23 ids.
        next: Ids fed after a prompt, one a step; row b of a batch takes them from position b on.
    """

    first: tuple[int, ...]
    all: tuple[tuple[int, ...], ...]
    equal: tuple[tuple[int, ...], ...]
    next: tuple[int, ...]

    @classmethod
    def below(cls, vocabulary: int) -> Self:
        """Prompts whose ids all lie below `vocabulary`."""
        words = np.random.PCG64(20_261_130).random_raw(sum(LENGTHS) + STEPS + len(LENGTHS))
        ids = tuple((int(word) >> 32) * vocabulary >> 32 for word in words)
        cut = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
        every = tuple(ids[a:b] for a, b in itertools.pairwise(cut))
        return cls(first=every[0], all=every, equal=tuple(p[: min(LENGTHS)] for p in every), next=ids[cut[-1] :])


def part(tensor: Tensor, *index: int | slice) -> Tensor:
    """`tensor[index]` with its bits as they are."""
    words = tensor.bits()[index]
    return Tensor(dtype=tensor.dtype, shape=words.shape, data=np.ascontiguousarray(words).tobytes())


def last(logits_BLV: Tensor) -> Tensor:
    """The last position of each row, [B, V]."""
    return part(logits_BLV, slice(None), -1)


def at_positions(logits_BLV: Tensor, positions: Sequence[int]) -> Tensor:
    """One position a row, [B, V]."""
    words = np.stack([logits_BLV.bits()[row, position] for row, position in enumerate(positions)])
    return Tensor(dtype=logits_BLV.dtype, shape=words.shape, data=words.tobytes())


def token_ids(ids: Sequence[int]) -> Tensor:
    """Ids as a tensor, so that they are judged like logits."""
    return Tensor.of(np.array(ids, dtype="<i4"))


def alone(subject: Subject, prompt: Sequence[int], row: int, prompts: Prompts) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reference of a row in a batch: its prompt by itself, then its next ids, one a step.

    Returns:
        The last row after the prompt [V], and the row after each step.
    """
    logits_BLV, state = subject.feed(subject.fresh(), [prompt])
    rows, _ = followed(subject, state, [row], prompts)
    return part(last(logits_BLV), 0), tuple(part(r, 0) for r in rows)


def followed(
    subject: Subject, state: State, rows: Sequence[int], prompts: Prompts, *, start: int = 0, count: int = STEPS
) -> tuple[list[Tensor], State]:
    """Feed each row its next ids, one a step.

    Args:
        subject: Asked.
        state: Of a batch with these rows.
        rows: Which of the prompts they are, so that each gets the ids that it gets alone.
        prompts: Where the ids come from.
        start: The first step.
        count: Steps.

    Returns:
        Logits [B, V] of each step, and the state after.
    """
    given = []
    for step in range(start, start + count):
        logits_BLV, state = subject.feed(state, [[prompts.next[row + step]] for row in rows])
        given.append(last(logits_BLV))
    return given, state
