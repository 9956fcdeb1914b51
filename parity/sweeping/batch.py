"""Invariances of a batch: each row computes what it would compute alone, whatever stands beside it.

Each is a generator of pairs. The reference of a row is always the row alone, fed the same ids.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from parity.logit_rows import rounded
from parity.sweeping.outcome import Pair
from parity.sweeping.rows import STEPS, Prompts, alone, followed, last, part
from parity.sweeping.subject import State, Subject
from parity.tensor import Tensor

HEADS: Final = {"q_BHLE": (3, 4, 5, 64), "k_BKTE": (3, 2, 9, 64), "v_BKTE": (3, 2, 9, 64)}  # 2 KV heads for 3 rows
PADDING: Final = (0, 2, 4)


def equal_lengths(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """Prompts of one length in one forward, no padding."""
    states = [subject.fresh() for _ in prompts.equal]
    logits, state = subject.feed(subject.merged(states), prompts.equal)
    yield from _rows(subject, prompts, prompts.equal, last(logits), state)


def left_padding(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """Prompts of different lengths in one forward, padded on the left."""
    rows, state = subject.prefilled(prompts.all, "left")
    yield from _rows(subject, prompts, prompts.all, rows, state)


def right_padding(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """Prompts of different lengths in one forward, padded on the right, the padding moved to the left afterwards."""
    rows, state = subject.prefilled(prompts.all, "right")
    yield from _rows(subject, prompts, prompts.all, rows, state)


def merged(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """Sequences that were run alone go on as one batch."""
    given, _ = followed(subject, _merged(subject, prompts, kv), range(len(prompts.all)), prompts)
    for row in range(len(prompts.all)):
        yield from _steps(row, _alone(subject, prompts, row, kv), [part(step, row) for step in given])


def filtered(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """A row leaves in the middle; the others do not notice."""
    _, state = followed(subject, _merged(subject, prompts, kv), range(len(prompts.all)), prompts, count=1)
    rows = (1, 2)
    given, _ = followed(subject, subject.kept(state, rows), rows, prompts, start=1, count=STEPS - 1)
    for place, row in enumerate(rows):
        yield from _steps(row, _alone(subject, prompts, row, kv)[1:], [part(step, place) for step in given])


def joined(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """A row comes in the middle; neither it nor the others notice."""
    states = [_alone_state(subject, prompts, row, kv) for row in range(len(prompts.all))]
    _, two = followed(subject, subject.merged(states[:2]), (0, 1), prompts, count=1)
    _, late = followed(subject, subject.merged(states[2:]), (2,), prompts, count=1)
    given, _ = followed(subject, subject.joined(two, late), (0, 1, 2), prompts, start=1, count=STEPS - 1)
    for row in range(len(prompts.all)):
        yield from _steps(row, _alone(subject, prompts, row, kv)[1:], [part(step, row) for step in given])


def joined_to_an_empty_batch(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """A batch that nothing was fed to yet joins one that was: the dtype of keys and values stays."""
    rows = range(2)
    fed = subject.merged([_alone_state(subject, prompts, row, kv) for row in rows])
    state = subject.joined(fed, subject.merged([subject.fresh()]))
    given, _ = followed(subject, subject.kept(state, tuple(rows)), rows, prompts)
    for row in rows:
        yield from _steps(row, _alone(subject, prompts, row, kv), [part(step, row) for step in given])


def extracted(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """A row is taken out of a batch in the middle and goes on alone."""
    _, state = followed(subject, _merged(subject, prompts, kv), range(len(prompts.all)), prompts, count=1)
    given, _ = followed(subject, subject.extracted(state, 1), [1], prompts, start=1, count=STEPS - 1)
    yield from _steps(1, _alone(subject, prompts, 1, kv)[1:], [part(step, 0) for step in given])


def stored_batch(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """A batch that went through a file goes on as if it had not, and can still lose a row."""
    _, state = followed(subject, _merged(subject, prompts, kv), range(len(prompts.all)), prompts, count=1)
    rows = (1, 2)
    state = subject.kept(subject.stored(state), rows)
    given, _ = followed(subject, state, rows, prompts, start=1, count=STEPS - 1)
    for place, row in enumerate(rows):
        yield from _steps(row, _alone(subject, prompts, row, kv)[1:], [part(step, place) for step in given])


def packed_attention(subject: Subject, heads: dict[str, Tensor], mask_B1LT: Tensor) -> Iterator[Pair]:
    """Attention over packed keys and values under a mask of one row a batch element = each element alone."""
    together = subject.packed_attention(heads, mask_B1LT)
    for row in range(mask_B1LT.shape[0]):
        one = slice(row, row + 1)
        own = subject.packed_attention({name: part(t, one) for name, t in heads.items()}, part(mask_B1LT, one))
        yield Pair(label=f"row {row}", expected=part(own, 0), actual=part(together, row))


def attention_inputs(dtype: str) -> tuple[dict[str, Tensor], Tensor]:
    """Heads of a batch of 3, and a causal mask [3, 1, 5, 9] with left padding, as a padded batch hands them over."""
    heads = {}
    for seed, (name, shape) in enumerate(HEADS.items()):
        words = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
        values = ((words >> np.uint64(40)).astype(np.float32) / 2**23 - 1).reshape(shape[0], -1)
        given = rounded(values, dtype)  # type: ignore[arg-type]
        heads[name] = Tensor(dtype=given[0].dtype, shape=shape, data=b"".join(row.data for row in given))
    L, T = HEADS["q_BHLE"][2], HEADS["k_BKTE"][2]
    causal = np.arange(T) <= np.arange(T - L, T)[:, None]
    mask = np.stack([(causal & (np.arange(T) >= padding))[None] for padding in PADDING])
    return heads, Tensor.of(mask.astype("u1"))


def _rows(
    subject: Subject, prompts: Prompts, fed: Sequence[Sequence[int]], rows_BV: Tensor, state: State
) -> Iterator[Pair]:
    """The last row after each prompt, then each step, against the row alone."""
    given, _ = followed(subject, state, range(len(fed)), prompts)
    for row, prompt in enumerate(fed):
        first, steps = alone(subject, prompt, row, prompts)
        yield Pair(label=f"row {row}, prompt", expected=first, actual=part(rows_BV, row))
        yield from _steps(row, steps, [part(step, row) for step in given])


def _steps(row: int, expected: Sequence[Tensor], actual: Sequence[Tensor]) -> Iterator[Pair]:
    for step, (want, got) in enumerate(zip(expected, actual, strict=True)):
        yield Pair(label=f"row {row}, step {step}", expected=want, actual=got)


def _alone_state(subject: Subject, prompts: Prompts, row: int, kv: str) -> State:
    _, state = subject.feed(subject.fresh(), [prompts.all[row]])
    return state if kv == "fp" else subject.packed(state, kv)


def _alone(subject: Subject, prompts: Prompts, row: int, kv: str) -> list[Tensor]:
    """The row after each next token of one prompt alone, [V] each."""
    given, _ = followed(subject, _alone_state(subject, prompts, row, kv), [row], prompts)
    return [part(step, 0) for step in given]


def _merged(subject: Subject, prompts: Prompts, kv: str) -> State:
    return subject.merged([_alone_state(subject, prompts, row, kv) for row in range(len(prompts.all))])
