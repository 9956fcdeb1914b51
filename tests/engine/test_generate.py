"""The loop: how a prompt is cut, when caches turn packed, which row is which, what is picked, and what is refused first."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.convert import KVMode
from engine.cache.plain import PlainCache
from engine.errors import RequestError
from engine.generate import PIECE, Feed, Step, forced, greedy, steps
from engine.model import CausalModel

Check = Callable[..., None]
Llama = Callable[..., CausalModel]
IDS = [3, 17, 99, 0, 127, 64, 5, 5, 41, 88, 2]
PATH = [9, 8, 7, 6]
KV8 = KVMode(bits=8, group_size=32, start=0)

FEEDS = {"whole": Feed(whole=True), "tail-split": Feed(), "pieces-of-4": Feed(piece=4), "pieces-of-1": Feed(piece=1)}
feeds = pytest.mark.parametrize("feed", FEEDS.values(), ids=FEEDS.keys())


def run(model: CausalModel, ids: Sequence[int] = IDS, **options: Any) -> list[Step]:
    return list(steps(model, ids, **{"num_steps": 4, "pick": forced(PATH), **options}))


# cutting a prompt


@given(length=st.integers(1, 70), piece=st.integers(1, 40), whole=st.booleans())
def test_the_pieces_of_a_prompt_are_the_prompt(length: int, piece: int, whole: bool) -> None:
    ids = list(range(length))
    pieces = Feed(whole=whole, piece=piece).cut(ids)
    assert [token_id for part in pieces for token_id in part] == ids
    assert all(len(part) > 0 for part in pieces)
    if whole:
        assert len(pieces) == 1
    else:
        assert len(pieces[-1]) == 1
        assert all(len(part) <= piece for part in pieces)
        assert all(len(part) == piece for part in pieces[:-2])  # only the one before the last may be shorter


@pytest.mark.parametrize(
    ("feed", "length", "expected"),
    [
        (Feed(whole=True), 5000, [5000]),
        (Feed(), 1, [1]),
        (Feed(), 2, [1, 1]),
        (Feed(), PIECE + 1, [2048, 1]),
        (Feed(), PIECE + 2, [2048, 1, 1]),
        (Feed(piece=4), 9, [4, 4, 1]),
        (Feed(piece=4), 8, [4, 3, 1]),
    ],
)
def test_the_last_token_of_a_prompt_is_fed_alone(feed: Feed, length: int, expected: list[int]) -> None:
    assert [len(part) for part in feed.cut(range(length))] == expected


# rows


@feeds
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_plain_caches_give_the_same_rows_for_every_feed(llama: Llama, same_bits: Check, feed: Feed, dtype: str) -> None:
    model = llama(dtype)
    hidden, _ = model.hidden(mx.array([[*IDS, *PATH[:3]]]), model.make_caches())
    expected = model.logits(hidden)[0, len(IDS) - 1 :]
    for row, step in zip(expected, run(model, feed=feed), strict=True):
        same_bits(row[None], step.logits_BV)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_as_many_rows_as_asked_for(llama: Llama, num_steps: int) -> None:
    got = run(llama(), num_steps=num_steps)
    assert [step.index for step in got] == list(range(num_steps))


def test_the_last_picked_token_is_not_fed(llama: Llama) -> None:
    assert [step.caches[0].offset for step in run(llama())] == [11, 12, 13, 14]


def test_a_picker_sees_each_row_once_and_its_choice_is_fed(llama: Llama, same_bits: Check, other_bits: Check) -> None:
    seen: list[tuple[mx.array, int]] = []

    def pick(logits: mx.array, index: int) -> int:
        seen.append((logits, index))
        return PATH[index]

    got = run(llama(), pick=pick)
    assert [step.token_id for step in got] == PATH
    assert [index for _, index in seen] == [0, 1, 2, 3]
    for (logits, _), step in zip(seen, got, strict=True):
        same_bits(logits, step.logits_BV)
    other = run(llama(), pick=forced([9, 1, 7, 6]))
    same_bits(got[1].logits_BV, other[1].logits_BV)
    other_bits(got[2].logits_BV, other[2].logits_BV)


def test_forced_ids_ignore_the_logits() -> None:
    pick = forced([5, 6])
    assert [pick(mx.array([[0.0, 9.0]]), index) for index in (0, 1)] == [5, 6]


@feeds
def test_continuing_on_returned_caches_is_not_stopping(llama: Llama, same_bits: Check, feed: Feed) -> None:
    model = llama()
    whole = run(model, feed=feed)
    half = run(model, feed=feed, num_steps=2)
    rest = run(model, [PATH[1]], num_steps=2, pick=forced(PATH[2:]), caches=half[-1].caches)
    for expected, actual in zip(whole, half + rest, strict=True):
        same_bits(expected.logits_BV, actual.logits_BV)


def test_continuing_on_packed_caches_is_not_stopping(llama: Llama, same_bits: Check) -> None:
    model = llama()
    whole = run(model, kv=KV8)
    half = run(model, kv=KV8, num_steps=2)
    rest = run(model, [PATH[1]], kv=KV8, num_steps=2, pick=forced(PATH[2:]), caches=half[-1].caches)
    for expected, actual in zip(whole, half + rest, strict=True):
        same_bits(expected.logits_BV, actual.logits_BV)


@pytest.mark.parametrize("kv", [None, KV8])
def test_given_caches_stay_as_they_are_and_may_be_continued_twice(
    llama: Llama, same_bits: Check, kv: KVMode | None
) -> None:
    model = llama()
    start = run(model, num_steps=1, kv=kv)[0]
    before = [mx.array(array) for cache in start.caches for array in cache.arrays]
    mx.eval(before)
    one, two = (run(model, [9], kv=kv, caches=start.caches) for _ in range(2))
    for expected, actual in zip(before, (a for cache in start.caches for a in cache.arrays), strict=True):
        same_bits(expected, actual)
    for expected_step, actual_step in zip(one, two, strict=True):
        same_bits(expected_step.logits_BV, actual_step.logits_BV)


# packed keys and values


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_prompt_fed_whole_has_a_first_row_of_plain_keys(
    llama: Llama, same_bits: Check, other_bits: Check, dtype: str
) -> None:
    model = llama(dtype)
    plain, packed = (run(model, feed=Feed(whole=True), kv=kv) for kv in (None, KV8))
    same_bits(plain[0].logits_BV, packed[0].logits_BV)
    other_bits(plain[1].logits_BV, packed[1].logits_BV)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_prompt_split_at_its_tail_has_a_first_row_of_packed_keys(llama: Llama, other_bits: Check, dtype: str) -> None:
    model = llama(dtype)
    plain, packed = (run(model, kv=kv)[0].logits_BV for kv in (None, KV8))
    other_bits(plain, packed)


def test_a_prompt_of_one_token_has_a_first_row_of_plain_keys(llama: Llama, same_bits: Check, other_bits: Check) -> None:
    plain, packed = (run(llama(), [5], kv=kv) for kv in (None, KV8))
    same_bits(plain[0].logits_BV, packed[0].logits_BV)
    other_bits(plain[1].logits_BV, packed[1].logits_BV)


def test_the_three_feeds_are_three_computations_on_packed_keys(llama: Llama, other_bits: Check) -> None:
    rows = [run(llama(), feed=FEEDS[name], kv=KV8)[0].logits_BV for name in ("whole", "tail-split", "pieces-of-4")]
    for one, two in [*pairwise(rows), (rows[0], rows[2])]:
        other_bits(one, two)


@feeds
@pytest.mark.parametrize("start", [0, 10, 11, 12, 13, 14, 15])
def test_caches_turn_packed_at_the_threshold(llama: Llama, feed: Feed, start: int) -> None:
    kinds = [
        {cache.kind for cache in step.caches}
        for step in run(llama(), feed=feed, kv=KVMode(bits=4, group_size=32, start=start))
    ]
    packed = [11 + index >= start for index in range(4)]
    assert kinds == [{"quantized-b4-g32" if is_packed else "plain"} for is_packed in packed]


def test_rows_before_the_threshold_are_those_of_plain_caches(llama: Llama, same_bits: Check, other_bits: Check) -> None:
    plain, packed = (run(llama(), kv=kv) for kv in (None, KVMode(bits=8, group_size=32, start=12)))
    for index in (0, 1):  # the row is taken first, the caches are converted after
        same_bits(plain[index].logits_BV, packed[index].logits_BV)
    for index in (2, 3):
        other_bits(plain[index].logits_BV, packed[index].logits_BV)


@pytest.mark.parametrize("one", [KVMode(bits=4, group_size=32), KVMode(bits=8, group_size=32)])
def test_width_counts(llama: Llama, other_bits: Check, one: KVMode) -> None:
    other_bits(run(llama(), kv=one)[1].logits_BV, run(llama(), kv=KVMode(bits=6, group_size=32))[1].logits_BV)


# picking


def test_greedy_takes_the_most_probable_id() -> None:
    assert greedy(mx.array([[0.0, -1.0, 3.0, 2.0]]), 0) == 2


@given(ties=st.sets(st.integers(0, 19), min_size=1, max_size=5), dtype=st.sampled_from([mx.float32, mx.bfloat16]))
@settings(max_examples=30, deadline=None)
def test_greedy_takes_the_lowest_id_on_a_tie(ties: set[int], dtype: mx.Dtype) -> None:
    logits = np.full((1, 20), -1.0, dtype=np.float32)
    logits[0, list(ties)] = 2.0
    assert greedy(mx.array(logits).astype(dtype), 0) == min(ties)


def test_greedy_sees_the_ties_that_subtracting_makes_in_bfloat16() -> None:
    values = np.full((1, 200), -1.0, dtype=np.float32)
    values[0, 3], values[0, 5] = 0.0078125, 0.0100097656
    for dtype, expected in ((mx.float32, 5), (mx.bfloat16, 3)):
        logits = mx.array(values).astype(dtype)
        assert int(mx.argmax(logits).item()) == 5  # the logits themselves are no tie
        assert greedy(logits, 0) == expected


def test_greedy_generates_what_its_rows_say(llama: Llama) -> None:
    got = run(llama(), pick=greedy)
    assert [step.token_id for step in got] == [int(mx.argmax(step.logits_BV).item()) for step in got]


# requests that are refused


class Unrun:
    """A model that must not be run."""

    vocabulary = 128
    head_width = 48
    no_packed_kv = None

    def make_caches(self) -> Any:
        return (PlainCache(),)

    def hidden(self, *_: object) -> Any:
        raise AssertionError("run before the request was checked")

    logits = hidden


def refusal(ids: Sequence[int] = (1,), **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        run(Unrun(), ids, **options)
    return str(caught.value)


def test_an_empty_prompt_is_refused() -> None:
    assert refusal([]) == "the prompt is empty\n  next  give at least one token"


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([1, 128], "128"),
        ([-1], "-1"),
        ([5, -3, 999, 2], "-3, 999"),
        ([200, 201, 202, 203, 204, 205, 206], "200, 201, 202, 203, 204"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(ids: list[int], named: str) -> None:
    assert refusal(ids) == (
        "the prompt has token ids outside the vocabulary\n"
        f"  ids         {named}\n"
        "  vocabulary  0 to 127\n"
        "  next        tokenise with the tokenizer of this snapshot"
    )


def test_the_highest_and_the_lowest_id_are_accepted(llama: Llama) -> None:
    assert len(run(llama(), [0, 127], num_steps=1)) == 1


@pytest.mark.parametrize("piece", [0, -1])
def test_a_piece_without_tokens_is_refused(piece: int) -> None:
    assert refusal(feed=Feed(piece=piece)) == (
        "a piece of the prompt needs at least one token\n"
        f"  piece  {piece}\n"
        "  next   use 1 or more"
    )  # fmt: skip


def test_a_group_that_does_not_divide_the_head_is_refused() -> None:
    assert refusal(kv=KVMode(bits=8, group_size=32)) == (
        "the KV mode does not fit the model's heads\n"
        "  head width  48\n"
        "  group size  32\n"
        "  next        choose a group size that divides 48"
    )


def test_an_unknown_kv_mode_is_refused() -> None:
    assert refusal(kv=KVMode(bits=7)).startswith("unknown KV mode\n")


def test_a_picked_id_outside_the_vocabulary_is_refused(llama: Llama) -> None:
    with pytest.raises(RequestError):
        run(llama(), pick=forced([128, 0, 0, 0]))


def test_too_few_forced_ids_are_refused(llama: Llama) -> None:
    with pytest.raises(RequestError):
        run(llama(), pick=forced([1, 2]))


def test_a_request_is_refused_when_it_is_made() -> None:
    with pytest.raises(RequestError):
        steps(Unrun(), [], num_steps=1)
