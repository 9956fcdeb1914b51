"""The batched loop: rows are those of sequences alone where sums do not depend on a ring's phase, and a run is a value."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.batch import BatchRow, BatchRun, Request, begin, begin_left
from engine.batch_forward import check_batchable, step_batch
from engine.cache.batch import extended, extracted, filtered, merged, padded
from engine.cache.convert import KVMode
from engine.cache.group import CacheGroup
from engine.cache.paged import PagedCache
from engine.cache.plain import PlainCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError
from engine.generate import Feed, forced, steps
from engine.model import CausalModel, open_model
from parity.models.fetch import ensure_snapshot

Check = Callable[..., None]
Llama = Callable[..., CausalModel]
PROMPTS = ([5, 9, 2, 77, 30, 8, 1, 2, 3, 11, 12], [4, 4, 9], [100], [7, 8, 9, 10, 11, 12])
FOLLOW = ([1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12, 13, 14])
QUANTIZED = KVMode(bits=8, group_size=32, order="from-empty")

Rows = dict[tuple[int, int], mx.array]


def requests() -> list[Request]:
    return [
        Request(prompt_ids=prompt, num_steps=len(ids), pick=forced(ids))
        for prompt, ids in zip(PROMPTS, FOLLOW, strict=True)
    ]


def alone(model: CausalModel, *, feed: Feed | None = None, kv: KVMode | None = None) -> Rows:
    return {
        (number, step.index): step.logits_BV
        for number, (prompt, ids) in enumerate(zip(PROMPTS, FOLLOW, strict=True))
        for step in steps(model, prompt, num_steps=len(ids), pick=forced(ids), feed=feed, kv=kv)
    }


def taken(rows: Sequence[BatchRow]) -> Rows:
    return {(row.number, row.index): row.logits_BV for row in rows}


def drained(run: BatchRun, joins: dict[int, Request] | None = None, rows: Sequence[BatchRow] = ()) -> Rows:
    """Turns until all sequences have their rows; `joins` come in before the turn of their number."""
    found, turn, joins = taken(rows), 0, joins or {}
    while run.numbers or any(at >= turn for at in joins):
        if turn in joins:
            run = run.insert(joins[turn])
        run, rows = run.turn()
        found |= taken(rows)
        turn += 1
    return found


def check(same_bits: Check, expected: Rows, actual: Rows) -> None:
    assert actual.keys() == expected.keys()
    for key, row in expected.items():
        same_bits(row, actual[key])


@pytest.fixture(params=["llama-tiny", "lfm2-tiny", "qwen3_5-tiny"])
def model(request: pytest.FixtureRequest) -> CausalModel:
    return open_model(ensure_snapshot(request.param).path, dtype="f32")


@pytest.mark.parametrize("piece", [2048, 4])
def test_each_row_of_a_run_is_that_of_its_sequence_alone(model: CausalModel, same_bits: Check, piece: int) -> None:
    run = begin(model, piece=piece)
    for request in requests():
        run = run.insert(request)
    check(same_bits, alone(model, feed=Feed(piece=piece)), drained(run))


@pytest.mark.parametrize("name", ["falcon_h1-tiny", "nemotron_h-tiny"])
def test_padding_stays_out_of_a_scans_matrices(same_bits: Check, name: str) -> None:
    model = open_model(ensure_snapshot(name).path, dtype="f32")
    run = begin(model)
    for request in requests():
        run = run.insert(request)
    expected = alone(model)
    check(same_bits, expected, drained(run))
    run, rows = begin_left(model, requests())
    check(same_bits, alone(model, feed=Feed(whole=True)), drained(run, rows=rows))


def test_sequences_that_join_and_leave_while_others_run_change_no_row(model: CausalModel, same_bits: Check) -> None:
    first, *others = requests()
    run = begin(model, piece=4).insert(first)
    found = drained(run, {2: others[0], 4: others[1], 5: others[2]})
    check(same_bits, alone(model, feed=Feed(piece=4)), found)


@pytest.mark.parametrize("feed", [Feed(whole=True), Feed(piece=4)])
def test_prompts_padded_at_their_left_change_no_row(model: CausalModel, same_bits: Check, feed: Feed) -> None:
    run, rows = begin_left(model, requests(), feed=feed)
    check(same_bits, alone(model, feed=Feed(whole=True)), drained(run, rows=rows))


def test_caches_of_sequences_alone_go_on_in_a_batch_and_come_out_again(model: CausalModel, same_bits: Check) -> None:
    begun = [list(steps(model, prompt, num_steps=1)) for prompt in PROMPTS]
    caches = merged([first.caches for (first,) in begun])
    logits_BV, caches = step_batch(model, [3, 1, 4, 1], caches)
    for row, ((first,), token) in enumerate(zip(begun, [3, 1, 4, 1], strict=True)):
        (expected,) = steps(model, [token], num_steps=1, caches=first.caches)
        same_bits(expected.logits_BV, logits_BV[row : row + 1])
        (after,) = steps(model, [50], num_steps=1, caches=expected.caches)
        (again,) = steps(model, [50], num_steps=1, caches=extracted(caches, row))
        same_bits(after.logits_BV, again.logits_BV)


def test_a_kept_run_is_a_fork_of_all_its_sequences(model: CausalModel, same_bits: Check) -> None:
    run = begin(model)
    for request in requests():
        run = run.insert(request)
    run, before = run.turn()
    first, second = drained(run, rows=before), drained(run, rows=before)
    check(same_bits, first, second)


def test_quantised_rows_are_those_of_sequences_that_are_packed_from_empty(llama: Llama, same_bits: Check) -> None:
    model = llama()
    run = begin(model, kv=QUANTIZED)
    for request in requests():
        run = run.insert(request)
    run, rows = run.turn()
    assert {cache.kind for cache in rows[0].caches} == {"batch-quantized-b8-g32"}
    check(same_bits, alone(model, kv=QUANTIZED), drained(run, rows=rows))


def test_a_removed_sequence_is_gone_and_the_others_go_on(llama: Llama, same_bits: Check) -> None:
    model = llama()
    run = begin(model)
    for request in requests():
        run = run.insert(request)
    run, first = run.turn()
    run, second = run.turn()
    left = drained(run.remove(0), rows=[*first, *second])
    expected = {key: row for key, row in alone(model).items() if key[0] != 0 or key in taken([*first, *second])}
    check(same_bits, expected, left)
    with pytest.raises(RequestError) as caught:
        run.remove(9)
    assert str(caught.value) == (
        "no such sequence in the run\n  asked for  9\n  there      2, 0, 1, 3\n  next       name one of these"
    )


def test_a_family_that_is_not_held_to_a_batch_is_refused() -> None:
    model = open_model(ensure_snapshot("deepseek_v3-tiny").path, dtype="f32")
    with pytest.raises(RequestError) as caught:
        begin(model)
    message = str(caught.value)
    assert message.startswith("the family does not run in batches\n  family  deepseek_v3\n  known   ")
    assert message.endswith("\n  next    run the sequences one by one")
    with pytest.raises(RequestError, match="does not run in batches"):
        step_batch(model, [1], ())


def test_a_mode_that_packs_on_the_way_is_refused(llama: Llama) -> None:
    with pytest.raises(RequestError) as caught:
        begin(llama(), kv=KVMode(bits=8, group_size=32))
    assert str(caught.value) == (
        "a batch's keys and values are not converted on the way\n"
        "  order  after-forward\n"
        "  next   choose a KV mode that packs from empty caches on, or fp"
    )


def test_rings_with_kept_positions_are_refused(llama: Llama) -> None:
    with pytest.raises(RequestError) as caught:
        begin(llama(), kv=KVMode(max_size=8))
    assert str(caught.value) == (
        "the cache cannot be part of a batch\n"
        "  kind   rotating-w8-k4\n"
        "  known  plain, rotating without kept positions, quantized, recurrent, groups of these\n"
        "  next   run the sequences one by one"
    )
    with pytest.raises(RequestError, match="cannot be part of a batch"):
        merged([[PagedCache.empty(blocks=1)]])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt_ids=[], num_steps=1), "a sequence of a batch asks for nothing"),
        (Request(prompt_ids=[1], num_steps=0), "a sequence of a batch asks for nothing"),
        (Request(prompt_ids=[1, 9999], num_steps=1), "the prompt has token ids outside the vocabulary"),
    ],
)
def test_a_request_that_asks_for_nothing_or_for_strangers_is_refused(
    llama: Llama, request_: Request, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        begin(llama()).insert(request_)


def test_left_padded_prompts_begin_together_on_fresh_caches(llama: Llama) -> None:
    model = llama()
    held = replace(requests()[0], caches=model.make_caches())
    for given in ([], [held]):
        with pytest.raises(RequestError) as caught:
            begin_left(model, given)
        assert str(caught.value) == (
            "prompts that are padded at their left begin together, on fresh caches\n"
            f"  requests  {len(given)}\n"
            "  next      give at least one request, without caches"
        )


def test_a_piece_of_nothing_is_refused(llama: Llama) -> None:
    with pytest.raises(RequestError, match="a piece of the prompt needs at least one token"):
        begin(llama(), piece=0)


def test_a_picked_stranger_is_refused(llama: Llama) -> None:
    run = begin(llama()).insert(Request(prompt_ids=[1], num_steps=1, pick=lambda *_: 10_000))
    with pytest.raises(RequestError, match="the picked token is outside the vocabulary"):
        run.turn()


def test_groups_of_caches_are_batched_member_by_member(normal: Callable[..., mx.array], same_bits: Check) -> None:
    def group(seed: int, length: int) -> CacheGroup:
        heads = normal(seed, (1, 2, length, 4))
        state = RecurrentCache.empty(1).advanced(normal(seed + 1, (1, 3)), by=length)
        ring = RotatingCache(max_size=8).append(heads, heads)[0]
        return CacheGroup(members=(PlainCache().append(heads, heads)[0], CacheGroup(members=(state, ring))))

    rows: list[list[Any]] = [[group(0, 3)], [group(10, 5)], [group(20, 1)]]
    caches = filtered(extended(merged(rows[:2]), merged(rows[2:])), [2, 0])
    assert caches[0].kind == "list[batch-plain,list[arrays-1,batch-rotating-w8]]"
    for row, own in enumerate((rows[2], rows[0])):
        (actual,) = extracted(caches, row)
        for expected, array in zip(own[0].arrays, actual.arrays, strict=True):
            same_bits(expected[:, :, : own[0].offset] if expected.ndim == 4 else expected, array)
    assert padded([CacheGroup(members=(PlainCache(),))], [0, 1])[0].kind == "list[batch-plain]"


def test_mixed_kinds_and_no_sequence_at_all_are_refused(llama: Llama) -> None:
    with pytest.raises(RequestError) as caught:
        merged([[PlainCache()], [RotatingCache(max_size=8)]])
    assert str(caught.value) == (
        "caches of different kinds cannot share a batch\n"
        "  kinds  plain, rotating-w8-k0\n"
        "  next   batch sequences of one model and one KV mode"
    )
    with pytest.raises(RequestError, match="caches of different kinds"):
        merged([[CacheGroup(members=(PlainCache(),))], [PlainCache()]])
    with pytest.raises(RequestError, match="a batch needs a sequence"):
        merged([])
    with pytest.raises(TypeError, match="single sequence's cache of kind plain"):
        filtered([PlainCache()], [0])
    check_batchable(llama())


def test_a_planted_position_that_counts_padding_is_seen(
    llama: Llama, other_bits: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    right = drained(*begin_left(model, requests())[:1])
    monkeypatch.setattr("engine.grouped_attention.positions", lambda cache: cache.offset)
    wrong = drained(*begin_left(model, requests())[:1])
    other_bits(right[1, 1], wrong[1, 1])


def test_a_planted_state_that_padding_enters_is_seen(same_bits: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(ensure_snapshot("qwen3_5-tiny").path, dtype="f32")
    expected = alone(model)
    monkeypatch.setattr(RecurrentCache, "mask", lambda *_: None)
    run = begin(model)
    for request in requests():
        run = run.insert(request)
    with pytest.raises(AssertionError):
        check(same_bits, expected, drained(run))
