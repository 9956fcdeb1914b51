"""Invariances of a subject's own generation loop: pieces, speculation, batches, penalties, its prompt cache."""

from collections.abc import Iterator, Mapping, Sequence

from parity.sweeping.outcome import Pair
from parity.sweeping.rows import Prompts, token_ids
from parity.sweeping.subject import Subject

TOKENS = 12
DRAFTS = ("itself", "stranger")
SHORT = 8  # a prompt that stays inside the window of 16


def any_piece(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """The same tokens for every size of the prompt's pieces."""
    expected = token_ids(subject.generated(prompts.first, TOKENS))
    for piece in (1, 7, 16):
        yield Pair(
            label=f"pieces of {piece}",
            expected=expected,
            actual=token_ids(subject.generated(prompts.first, TOKENS, piece=piece)),
        )


def speculative_is_plain(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """Speculation gives the plain greedy tokens, drafted by the model itself (accepted) and by a stranger (mostly refused)."""
    for length in (SHORT, len(prompts.first)):
        prompt = prompts.first[:length]
        expected = token_ids(subject.generated(prompt, TOKENS))
        for draft in DRAFTS:
            yield Pair(
                label=f"prompt of {length}, drafted by {draft}",
                expected=expected,
                actual=token_ids(subject.generated(prompt, TOKENS, draft=draft)),
            )


def batched_is_single(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """Each prompt's greedy tokens in a batch = alone."""
    together = subject.generated_together(prompts.all, TOKENS)
    for row, prompt in enumerate(prompts.all):
        expected = token_ids(subject.generated(prompt, TOKENS))
        yield Pair(label=f"row {row}", expected=expected, actual=token_ids(together[row]))


def penalty_sees_the_prompt(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """With a repetition penalty: the same tokens alone and in a batch, and in pieces of any size."""
    together = subject.generated_together(prompts.all, TOKENS, penalty=True)
    for row, prompt in enumerate(prompts.all):
        expected = token_ids(subject.generated(prompt, TOKENS, penalty=True))
        yield Pair(label=f"row {row}", expected=expected, actual=token_ids(together[row]))
    expected = token_ids(subject.generated(prompts.first, TOKENS, penalty=True))
    actual = token_ids(subject.generated(prompts.first, TOKENS, penalty=True, piece=7))
    yield Pair(label="pieces of 7", expected=expected, actual=actual)


def prompt_cache_hit(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """A prompt that the prompt cache holds in part, or with more behind it, gives the tokens of a cold run."""
    yield from _through(subject, prompts, {"a part": prompts.first[:30], "more": (*prompts.first, *prompts.next[:2])})


def prompt_cache_repeat(subject: Subject, prompts: Prompts) -> Iterator[Pair]:
    """A prompt that the prompt cache holds entirely gives the tokens of a cold run."""
    yield from _through(subject, prompts, {"all of it": prompts.first})


def _through(subject: Subject, prompts: Prompts, kept: Mapping[str, Sequence[int]]) -> Iterator[Pair]:
    expected = token_ids(subject.generated(prompts.first, TOKENS))
    for label, first in kept.items():
        actual = token_ids(subject.through_prompt_cache(first, prompts.first, TOKENS))
        yield Pair(label=label, expected=expected, actual=actual)
