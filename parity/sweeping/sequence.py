"""Invariances of one sequence: repetition, pieces, no cache, forks, files, trimming, order of requests.

Each is a generator of pairs; `kv` is the mode that the state is converted to after its prompt, `fp` for none. Where the mode
changes what is computed by design (keys that are packed before the next piece attends to them), the invariance says so.
"""

from collections.abc import Iterator

from parity.sweeping.outcome import Pair
from parity.sweeping.rows import STEPS, Prompts, followed, last, part
from parity.sweeping.subject import State, Subject
from parity.tensor import Tensor

PIECES = ((16, 24), (1, 7, 29, 3))
DROPPED = 5  # tokens that are trimmed and fed again


def same_call_twice(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """The same sequence run twice in one process."""
    yield from _pairs(_run(subject, prompts, kv), _run(subject, prompts, kv))


def order_of_requests(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """A sequence does not depend on what ran before it."""
    expected = _run(subject, prompts, kv)
    for prompt in prompts.all[1:]:
        subject.feed(subject.fresh(), [prompt])
    yield from _pairs(expected, _run(subject, prompts, kv))


def one_by_one(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """n tokens one after the other = n tokens at once, at every position."""
    whole, _ = subject.feed(subject.fresh(), [prompts.first])
    state = subject.fresh()
    for position, token_id in enumerate(prompts.first):
        row, state = subject.feed(state, [[token_id]])
        yield Pair(label=f"position {position}", expected=part(whole, 0, position), actual=part(row, 0, 0))


def in_pieces(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """A prompt in pieces of any size = the prompt whole, at every position."""
    whole, _ = subject.feed(subject.fresh(), [prompts.first])
    for sizes in PIECES:
        state, start = subject.fresh(), 0
        for size in sizes:
            rows, state = subject.feed(state, [prompts.first[start : start + size]])
            expected = part(whole, 0, slice(start, start + size))
            yield Pair(label=f"piece {start} to {start + size}", expected=expected, actual=part(rows, 0))
            start += size


def without_cache(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """The same logits with a fresh cache and with none, at every position."""
    expected, _ = subject.feed(subject.fresh(), [prompts.first])
    actual, _ = subject.feed(None, [prompts.first])
    yield Pair(label="prompt", expected=expected, actual=actual)


def compiled_or_not(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """The same logits with compiled functions and without."""
    expected, _ = subject.feed(subject.fresh(), [prompts.first])
    yield Pair(label="prompt", expected=expected, actual=subject.compiled([prompts.first]))


def fork_is_fresh(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """Two branches of one prompt = two runs from the beginning."""
    expected = [_run(subject, prompts, kv, row=row) for row in (0, 1)]
    _, state = subject.feed(subject.fresh(), [prompts.first])
    state = _converted(subject, state, kv)
    branch = subject.fork(state)
    for row, held in ((0, state), (1, branch)):
        given, _ = followed(subject, held, [row], prompts)
        yield from _pairs(expected[row][1:], given, f"branch {row}, ")


def stored_and_read(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """A state that went through a file continues as if it had not."""
    expected = _run(subject, prompts, kv)
    _, state = subject.feed(subject.fresh(), [prompts.first])
    given, _ = followed(subject, subject.stored(_converted(subject, state, kv)), [0], prompts)
    yield from _pairs(expected[1:], given)


def stored_while_decoding(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """Likewise, the state written after a step of one token, when a ring may have turned."""
    expected = _run(subject, prompts, kv)
    _, state = subject.feed(subject.fresh(), [prompts.first])
    _, state = followed(subject, _converted(subject, state, kv), [0], prompts, count=1)
    given, _ = followed(subject, subject.stored(state), [0], prompts, start=1, count=STEPS - 1)
    yield from _pairs(expected[2:], given)


def trimmed_and_fed_again(subject: Subject, prompts: Prompts, kv: str) -> Iterator[Pair]:
    """Taking the last tokens away and feeding them again changes nothing."""
    expected, state = subject.feed(subject.fresh(), [prompts.first])
    if kv != "fp":
        state = subject.packed(state, kv)
        again, state = subject.feed(state, [prompts.next[:DROPPED]])
        state = subject.trimmed(state, DROPPED)
        actual, _ = subject.feed(state, [prompts.next[:DROPPED]])
        yield Pair(label="fed again", expected=again, actual=actual)
        return
    state = subject.trimmed(state, DROPPED)
    actual, state = subject.feed(state, [prompts.first[-DROPPED:]])
    yield Pair(label="fed again", expected=part(expected, 0, slice(-DROPPED, None)), actual=part(actual, 0))
    given, _ = followed(subject, state, [0], prompts)
    yield from _pairs(_run(subject, prompts, kv)[1:], given)


def _run(subject: Subject, prompts: Prompts, kv: str, *, row: int = 0) -> list[Tensor]:
    """The last row after the prompt, then the row after each next token."""
    logits, state = subject.feed(subject.fresh(), [prompts.first])
    given, _ = followed(subject, _converted(subject, state, kv), [row], prompts)
    return [last(logits), *given]


def _converted(subject: Subject, state: State, kv: str) -> State:
    return state if kv == "fp" else subject.packed(state, kv)


def _pairs(expected: list[Tensor], actual: list[Tensor], label: str = "") -> Iterator[Pair]:
    for step, (want, got) in enumerate(zip(expected, actual, strict=True)):
        yield Pair(label=f"{label}row {step}", expected=want, actual=got)
