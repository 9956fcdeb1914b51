"""Which equalities are asked of a subject, by name.

Guarantees: every invariance has one name; the order is fixed. `plain` ones are asked once a dtype, `packed` ones once more for
each KV mode, because they must hold whatever the cache holds; those of filters and of weights are asked where they apply.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from parity.sweeping import batch, filters, loop, sequence
from parity.sweeping.outcome import Outcome, Pair, outcome_of
from parity.sweeping.rows import Prompts
from parity.sweeping.subject import Subject

Plain = Callable[[Subject, Prompts], Iterator[Pair]]
Packed = Callable[[Subject, Prompts, str], Iterator[Pair]]

PLAIN: Final[Mapping[str, Plain]] = {
    "one-by-one": sequence.one_by_one,
    "in-pieces": sequence.in_pieces,
    "without-cache": sequence.without_cache,
    "compiled-or-not": sequence.compiled_or_not,
    "batch-equal-lengths": batch.equal_lengths,
    "batch-left-padding": batch.left_padding,
    "batch-right-padding": batch.right_padding,
    "loop-any-piece": loop.any_piece,
    "loop-speculative": loop.speculative_is_plain,
    "loop-batched": loop.batched_is_single,
    "loop-penalty": loop.penalty_sees_the_prompt,
    "loop-prompt-cache": loop.prompt_cache_hit,
    "loop-prompt-repeated": loop.prompt_cache_repeat,
}
PACKED: Final[Mapping[str, Packed]] = {
    "same-call-twice": sequence.same_call_twice,
    "order-of-requests": sequence.order_of_requests,
    "fork-is-fresh": sequence.fork_is_fresh,
    "stored-and-read": sequence.stored_and_read,
    "stored-while-decoding": sequence.stored_while_decoding,
    "trimmed-and-fed-again": sequence.trimmed_and_fed_again,
    "batch-merged": batch.merged,
    "batch-filtered": batch.filtered,
    "batch-joined": batch.joined,
    "batch-joined-to-empty": batch.joined_to_an_empty_batch,
    "batch-extracted": batch.extracted,
    "batch-stored": batch.stored_batch,
}
WEIGHTS: Final = ("sanitised-twice", "spare-head")
FILTERED: Final = tuple(f"filter-{name}-{kind}" for name in filters.FILTERS for kind in ("alone", "renumbered"))
PACKED_ATTENTION: Final = "packed-attention-rows"


def names(kv: str) -> tuple[str, ...]:
    """Names of what is asked of a model in a KV mode."""
    return (*PLAIN, *PACKED, *WEIGHTS) if kv == "fp" else tuple(PACKED)


def ask(subject: Subject, name: str, kv: str) -> Outcome:
    """Ask one equality of a model."""
    prompts = Prompts.below(subject.vocabulary)
    if name in PLAIN:
        return outcome_of(PLAIN[name](subject, prompts))
    if name in PACKED:
        return outcome_of(PACKED[name](subject, prompts, kv))
    return outcome_of(_reread(subject, prompts, name))


def ask_functions(subject: Subject, name: str, dtype: str) -> Outcome:
    """Ask one equality of a subject's functions, which need no model."""
    if name == PACKED_ATTENTION:
        return outcome_of(batch.packed_attention(subject, *batch.attention_inputs(dtype)))
    _, which, kind = name.split("-")
    asked = filters.row_is_alone if kind == "alone" else filters.ids_may_be_renumbered
    return outcome_of(asked(subject, which, dtype))


def functions() -> tuple[str, ...]:
    """Names of what is asked of a subject's functions."""
    without = {f"filter-{name}-renumbered" for name in filters.FILTERS if name not in filters.ORDER_FREE}
    return (PACKED_ATTENTION, *(name for name in FILTERED if name not in without))


def _reread(subject: Subject, prompts: Prompts, change: str) -> Iterator[Pair]:
    """The logits of a prompt before and after the weights were read once more."""
    expected, _ = subject.feed(subject.fresh(), [prompts.first])
    other = subject.with_weights(change)
    actual, _ = other.feed(other.fresh(), [prompts.first])
    yield Pair(label="prompt", expected=expected, actual=actual)
