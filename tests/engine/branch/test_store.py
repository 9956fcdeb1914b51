"""The branch store: its tree, its steps, its sequence operations, and that an error leaves every branch as it was."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.branch.samplers import ChainSampler
from engine.branch.slots import StaleHandleError
from engine.branch.store import BranchStore
from engine.branch.tree import Pressure
from engine.cache.convert import KVMode
from engine.errors import RequestError
from engine.generate import Feed
from engine.metrics import perplexity, surprisal
from engine.sampling.chain import Chain
from engine.sampling.keys import SequentialKeys
from tests.engine.tiny_runs import RUNS, digest, random_ids, rows_of, words

PROMPT = random_ids(3, 12)
A, B, C, D = random_ids(4, 4)


@pytest.fixture
def store() -> BranchStore:
    return BranchStore(RUNS["plain"].model)


def bits(store: BranchStore, handle: int) -> str:
    return digest(words(store.snapshot(handle).row_BV))


def fresh(ids: list[int]) -> str:
    """The row after these ids in a run of its own: of plain caches the bits do not depend on how a prompt was cut."""
    return rows_of(RUNS["plain"].run(ids, rows=1))[-1]


# The tree


def test_parents_and_children_are_told(store: BranchStore) -> None:
    root = store.open(PROMPT)
    one, two = store.fork(root), store.fork(root)
    below = store.fork(one)
    assert store.children(root) == (one, two)
    assert (store.parent(root), store.parent(one), store.parent(below)) == (None, root, one)
    assert len(store) == 4
    assert store.available == 65_535 - 4


def test_a_branch_with_children_is_not_pruned_alone(store: BranchStore) -> None:
    root = store.open(PROMPT)
    child = store.fork(root)
    with pytest.raises(RequestError) as caught:
        store.prune(root)
    assert str(caught.value) == (
        "the branch has children\n  children  1\n  next      prune them first, or the whole subtree at once"
    )
    assert root in store
    store.prune(child)
    assert store.children(root) == ()
    store.prune(root)
    assert len(store) == 0


def test_a_subtree_goes_whole_and_nothing_else(store: BranchStore) -> None:
    root = store.open(PROMPT)
    one, two = store.fork(root), store.fork(root)
    below = [store.fork(one) for _ in range(2)]
    deepest = store.fork(below[0])
    assert store.prune_subtree(one) == 4
    assert [handle in store for handle in (root, one, two, *below, deepest)] == [True, False, True, False, False, False]
    assert store.children(root) == (two,)


def test_only_the_winner_stays_and_goes_on(store: BranchStore) -> None:
    root = store.open(PROMPT)
    winner, loser = store.fork(root), store.fork(root)
    store.fork(winner)
    store.step_each([(winner, A), (loser, B)])
    store.retain_only(winner)
    assert [handle in store for handle in (root, winner, loser)] == [False, True, False]
    assert (store.parent(winner), store.children(winner), len(store)) == (None, (), 1)
    store.step_each([(winner, C)])
    assert bits(store, winner) == fresh([*PROMPT, A, C])


def test_a_stale_handle_is_refused_by_every_operation(store: BranchStore) -> None:
    gone, here = store.open(PROMPT), store.open(PROMPT)
    value = store.snapshot(gone)
    store.prune(gone)
    again = store.open(PROMPT)  # on the same place
    assert again % 65_536 == gone % 65_536
    for use in (
        store.fork,
        store.prune,
        store.prune_subtree,
        store.retain_only,
        store.parent,
        store.children,
        store.snapshot,
        store.sample,
        store.size,
        lambda h: store.restore(h, value),
        lambda h: store.feed(h, [A]),
        lambda h: store.accept(h, A),
        lambda h: store.decode_each([(here, A), (h, A)]),
        lambda h: store.step_each([(here, A), (h, A)]),
        lambda h: store.copy(h, here),
        lambda h: store.copy(here, h),
        lambda h: store.remove(h, 2),
        lambda h: store.clear_and_reseed(h, PROMPT[:2], [A]),
    ):
        with pytest.raises(StaleHandleError):
            use(gone)
    assert (store.size(here), store.size(again), len(store)) == (12, 12, 2)


def test_clear_leaves_nothing(store: BranchStore) -> None:
    handles = [store.open(PROMPT), store.open()]
    store.clear()
    assert len(store) == 0
    assert not any(handle in store for handle in handles)


# Steps


@pytest.fixture
def rows_fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each forward had."""
    model, rows = type(RUNS["plain"].model), list[int]()
    really = model.hidden

    def hidden(self: Any, ids_BL: mx.array, caches: Any) -> Any:
        rows.append(ids_BL.shape[0])
        return really(self, ids_BL, caches)

    monkeypatch.setattr(model, "hidden", hidden)
    return rows


def test_equally_long_branches_share_one_forward_and_the_others_go_alone(
    store: BranchStore, rows_fed: list[int]
) -> None:
    root = store.open(PROMPT)
    handles = [root, store.fork(root), store.open(PROMPT[:7]), store.fork(root)]
    rows_fed.clear()
    store.decode_each(list(zip(handles, (A, B, C, D), strict=True)))
    assert sorted(rows_fed) == [1, 3]
    for handle, ids in zip(handles, ([*PROMPT, A], [*PROMPT, B], [*PROMPT[:7], C], [*PROMPT, D]), strict=True):
        assert store.snapshot(handle).tokens == tuple(ids)
        assert bits(store, handle) == fresh(ids)


@pytest.mark.parametrize("kind", RUNS)
def test_a_batched_step_has_the_bits_of_steps_one_by_one(kind: str) -> None:
    run, rows = RUNS[kind], []
    for batched in (True, False):
        store = BranchStore(run.model, kv=run.kv, make_caches=run.make_caches, batched=batched)
        handles = [store.open(random_ids(seed, 18)) for seed in (1, 2, 3)]
        for step in range(5):
            store.step_each([(handle, random_ids(10 * step + handle % 7, 1)[0]) for handle in handles])
        rows.append([bits(store, handle) for handle in handles])
    assert rows[0] == rows[1]


def test_tokens_are_accepted_before_they_are_fed(store: BranchStore) -> None:
    handle = store.open(PROMPT)
    rows = []
    for token_id in (A, B, C):
        rows.append(store.snapshot(handle).row_BV)
        store.step_each([(handle, token_id)])
    expected = perplexity(mx.concatenate(rows), [A, B, C])
    assert store.snapshot(handle).metrics.model.value == pytest.approx(expected, rel=1e-12)
    assert store.snapshot(handle).metrics.sampling.count == 0, "they were given, not drawn"


def test_only_drawn_tokens_count_for_the_samplers_perplexity(store: BranchStore) -> None:
    sampler = ChainSampler(chain=Chain(temperature=0.8, top_k=5), keys=SequentialKeys.of(2))
    handle = store.open(PROMPT, sampler=sampler)
    token_id = store.sample(handle)
    prior = store.snapshot(handle).last_sampling_prior
    assert prior is not None
    store.step_each([(handle, token_id)])
    metrics = store.snapshot(handle).metrics
    assert (metrics.model.count, metrics.sampling.count) == (1, 1)
    assert np.exp(-metrics.sampling.nats) == pytest.approx(prior)
    assert store.snapshot(handle).last_sampling_prior is None
    other = (store.sample(handle) + 1) % 500
    store.step_each([(handle, other)])
    assert store.snapshot(handle).metrics.sampling.count == 1


def test_a_bad_token_changes_no_branch(store: BranchStore) -> None:
    one = store.open(PROMPT)
    two = store.fork(one)
    before = [store.snapshot(one), store.snapshot(two), store.pressure]
    for step in (store.decode_each, store.step_each):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            step([(one, A), (two, 512)])
    with pytest.raises(RequestError) as caught:
        store.decode_each([(one, A), (one, B)])
    assert str(caught.value) == ("a branch is stepped twice at once\n  next  name each branch once, or fork it")
    with pytest.raises(RequestError, match="the branch is fed token ids outside the vocabulary"):
        store.feed(one, [A, -1])
    assert [store.snapshot(one), store.snapshot(two), store.pressure] == before


def test_branches_are_fed_different_numbers_of_tokens(store: BranchStore) -> None:
    one = store.open(PROMPT)
    two = store.fork(one)
    before = store.snapshot(one)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        store.feed_each([(one, [A]), (two, [B, 512])])
    assert store.snapshot(one) is before
    with pytest.raises(RequestError, match="a branch is stepped twice at once"):
        store.feed_each([(one, [A]), (one, [B])])
    store.feed_each([(one, [A]), (two, [B, C, D])])
    assert bits(store, one) == fresh([*PROMPT, A])
    assert bits(store, two) == fresh([*PROMPT, B, C, D])
    assert store.pressure.cells_used == 16


def test_feeding_nothing_is_refused(store: BranchStore) -> None:
    handle = store.open(PROMPT)
    with pytest.raises(RequestError) as caught:
        store.feed(handle, [])
    assert str(caught.value) == "no tokens to feed\n  next  give at least one token"


def test_a_mode_that_the_model_cannot_have_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match="the model's keys and values cannot be packed"):
        BranchStore(RUNS["latents-and-index"].model, kv=KVMode(bits=8))


# Sequence operations


def test_a_copy_shares_arrays_and_keeps_the_targets_sampler(store: BranchStore) -> None:
    source, target = store.open(PROMPT), store.open([A, B])
    own = store.snapshot(target).sampler
    store.copy(source, target)
    given, copied = store.snapshot(source), store.snapshot(target)
    assert copied.tokens == given.tokens
    assert copied.sampler is own
    assert all(a is b for a, b in zip(given.caches, copied.caches, strict=True))
    store.step_each([(target, C)])
    assert bits(store, target) == fresh([*PROMPT, C])
    assert store.size(source) == 12


def test_the_end_of_a_sequence_can_be_removed_and_fed_again(store: BranchStore) -> None:
    handle = store.open([*PROMPT, A, B])
    store.remove(handle, 12)
    assert store.snapshot(handle).tokens == tuple(PROMPT)
    with pytest.raises(RequestError) as caught:
        store.sample(handle)
    assert str(caught.value) == "the branch has no logits\n  tokens  12\n  next    feed it at least one token"
    store.feed(handle, [C])
    assert bits(store, handle) == fresh([*PROMPT, C])
    store.remove(handle, 13, 13)  # nothing
    assert bits(store, handle) == fresh([*PROMPT, C])


def test_the_middle_of_a_sequence_cannot_be_removed(store: BranchStore) -> None:
    handle = store.open(PROMPT)
    with pytest.raises(RequestError) as caught:
        store.remove(handle, 3, 5)
    assert str(caught.value) == (
        "only the end of a sequence can be removed\n"
        "  start      3\n"
        "  end        5\n"
        "  positions  0 to 12\n"
        "  next       remove to the end (-1), or reseed from the first and the last tokens"
    )
    for start, end in ((-1, -1), (13, -1), (5, 3), (0, 13)):
        with pytest.raises(RequestError, match="no such range of positions"):
            store.remove(handle, start, end)
    assert store.size(handle) == 12


def test_what_a_ring_or_a_state_has_replaced_cannot_be_removed() -> None:
    for kind in ("rotating", "recurrent", "scan-and-plain"):
        store = BranchStore(RUNS[kind].model)
        handle = store.open(random_ids(1, 20))
        before = store.snapshot(handle)
        with pytest.raises(RequestError, match="the caches cannot forget their last tokens"):
            store.remove(handle, 18)
        assert store.snapshot(handle) is before


@pytest.mark.parametrize("kind", RUNS)
def test_a_restored_snapshot_goes_on_as_it_did(kind: str) -> None:
    run = RUNS[kind]
    store = BranchStore(run.model, kv=run.kv, make_caches=run.make_caches)
    handle = store.open(random_ids(1, 20))
    store.step_each([(handle, A)])
    saved = store.snapshot(handle)
    rows = []
    for _ in range(2):
        taken = []
        for token_id in (B, C, D):
            store.step_each([(handle, token_id)])
            taken.append(bits(store, handle))
        rows.append(taken)
        store.restore(handle, saved)
    assert rows[0] == rows[1]
    elsewhere = store.adopt(saved)
    store.step_each([(elsewhere, B)])
    assert bits(store, elsewhere) == rows[0][0]


@pytest.mark.parametrize("kind", RUNS)
def test_a_reseeded_branch_has_the_logits_of_a_fresh_one(kind: str) -> None:
    run = RUNS[kind]
    store = BranchStore(run.model, kv=run.kv, make_caches=run.make_caches)
    handle = store.open(random_ids(1, 20))
    for token_id in random_ids(2, 10):
        store.step_each([(handle, token_id)])
    history = store.snapshot(handle).tokens
    metrics = store.snapshot(handle).metrics
    sinks, tail = history[:4], history[-9:]
    store.clear_and_reseed(handle, sinks, tail)
    other = store.open([*sinks, *tail])
    assert store.snapshot(handle).tokens == (*sinks, *tail)
    assert {cache.offset for cache in store.snapshot(handle).caches} == {13}
    assert store.snapshot(handle).metrics == metrics
    assert bits(store, handle) == bits(store, other)
    store.step_each([(handle, A), (other, A)])
    assert bits(store, handle) == bits(store, other)


def test_sinks_that_are_not_the_first_tokens_are_refused(store: BranchStore) -> None:
    handle = store.open(PROMPT)
    before = store.snapshot(handle)
    with pytest.raises(RequestError) as caught:
        store.clear_and_reseed(handle, PROMPT[1:3], PROMPT[-4:])
    assert str(caught.value) == (
        "the sinks are not the first tokens of the sequence\n"
        f"  sinks  {PROMPT[1]}, {PROMPT[2]}\n"
        f"  first  {PROMPT[0]}, {PROMPT[1]}\n"
        "  next   keep the first tokens of the prompt, and pass them at every reseed"
    )
    with pytest.raises(RequestError) as caught:
        store.clear_and_reseed(handle, [], [])
    assert str(caught.value) == (
        "nothing to reseed from\n  sinks  0\n  tail   0\n  next   give the first or the last tokens"
    )
    assert store.snapshot(handle) is before
    store.clear_and_reseed(handle, PROMPT[:2], [])
    store.clear_and_reseed(handle, PROMPT[:2], [A])
    assert store.snapshot(handle).tokens == (*PROMPT[:2], A)


# Room


def test_what_forks_share_counts_once_and_comes_back_when_they_go() -> None:
    store = BranchStore(RUNS["plain"].model, context=20)
    root = store.open(PROMPT)
    one, two = store.fork(root), store.fork(root)
    store.decode_each([(one, A), (two, B)])
    store.decode_each([(one, A)])
    assert store.pressure == Pressure(context=20, cells_used=15, remaining=5)
    before = store.snapshot(two)
    with pytest.raises(RequestError) as caught:
        store.feed(two, [A] * 6)
    assert str(caught.value) == (
        "the context is full\n"
        "  context  20\n"
        "  used     15\n"
        "  wanted   6\n"
        "  next     prune branches, or reseed from the first and the last tokens"
    )
    assert store.snapshot(two) is before
    store.prune(one)
    assert store.pressure.cells_used == 13
    store.retain_only(two)
    assert store.pressure.cells_used == 13
    store.prune(two)
    assert store.pressure == Pressure(context=20, cells_used=0, remaining=20)
    assert BranchStore(RUNS["plain"].model).pressure.remaining is None


def test_what_a_relative_still_holds_is_not_given_back() -> None:
    store = BranchStore(RUNS["plain"].model, context=40)
    root = store.open(PROMPT)
    child = store.fork(root)
    store.decode_each([(child, A)])
    store.remove(child, 5)  # one token of its own, seven of the root's
    assert store.pressure.cells_used == 12
    store.feed(child, [A, B])
    assert store.pressure.cells_used == 14
    saved = store.snapshot(child)
    store.feed(child, [C])
    store.restore(child, saved)
    assert store.pressure.cells_used == 14
    store.clear_and_reseed(child, PROMPT[:2], [A])  # nothing is shared any more
    assert store.pressure.cells_used == 15
    store.copy(root, child)
    assert store.pressure.cells_used == 12
    store.prune(child)
    assert store.pressure.cells_used == 12
    store.prune(root)
    assert store.pressure.cells_used == 0


def test_prompts_are_cut_as_asked(rows_fed: list[int]) -> None:
    BranchStore(RUNS["plain"].model, how=Feed(piece=5)).open(PROMPT)
    assert len(rows_fed) == 4  # 5, 5, 1 and the last one


# Logits


def test_logits_can_be_read_replaced_and_merged(store: BranchStore) -> None:
    one, two = store.open(PROMPT), store.open(PROMPT[:5])
    branch, other = store.snapshot(one), store.snapshot(two)
    row = np.array(branch.row_BV)[0]
    assert branch.logits_at([A, 0]) == [float(row[A]), float(row[0])]
    assert branch.prior(A) == pytest.approx(float(np.exp(-surprisal(branch.row_BV, [A])[0])))
    merged = branch.merged_logits([other, other], alpha=0.5)
    expected = (branch.row_BV + other.row_BV * 0.5) + other.row_BV * 0.5
    assert digest(words(merged.row_BV)) == digest(words(expected))
    assert branch.row_BV is store.snapshot(one).row_BV
    for use in (lambda: branch.logits_at([512]), lambda: branch.prior(-1), lambda: branch.accepted(999)):
        with pytest.raises(RequestError, match="no logits for ids outside the vocabulary"):
            use()
    with pytest.raises(RequestError) as caught:
        branch.with_logits(mx.zeros((1, 3)))
    assert str(caught.value) == (
        "the logits do not fit the branch\n"
        "  expected  [1, 512]\n"
        "  actual    [1, 3]\n"
        "  next      pass a row of the same model"
    )


def test_an_empty_branch_has_size_0_and_no_last_position(store: BranchStore) -> None:
    empty = store.snapshot(store.open())
    assert (empty.size, empty.pos_max) == (0, -1)
