"""Two forks are two sequences: each goes on as a fresh run of its own tokens would, bit for bit, whatever the other does."""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.branch import forward
from engine.branch.branch import Branch
from engine.branch.samplers import ChainSampler, GreedySampler, LlamaSampler
from engine.branch.store import BranchStore
from engine.cache.protocol import Cache
from engine.llama_sampling.generators import Mt19937
from engine.llama_sampling.history import TokenHistoryTracker
from engine.llama_sampling.strategy import SamplingStrategy
from engine.sampling.chain import Chain
from engine.sampling.keys import SequentialKeys
from engine.sampling.processors import Processing
from tests.engine.tiny_runs import RUNS, digest, random_ids, rows_of, words

PROMPT = random_ids(3, 20)  # past the window of 16, so that a ring has turned
LEFT, RIGHT = random_ids(4, 12), random_ids(5, 12)


def bits_of(branch: Branch) -> str:
    return digest(words(branch.row_BV))


def stepped(store: BranchStore, handle: int, ids: list[int]) -> list[str]:
    """The row after each token."""
    rows = []
    for token_id in ids:
        store.step_each([(handle, token_id)])
        rows.append(bits_of(store.snapshot(handle)))
    return rows


@functools.cache
def fresh(kind: str, side: str) -> list[str]:
    """The same rows of a run of its own through the loop."""
    later = {"left": LEFT, "right": RIGHT}[side]
    return rows_of(RUNS[kind].run([*PROMPT, *later], rows=len(later) + 1))[1:]


@pytest.mark.parametrize("kind", RUNS)
def test_fork_then_generate_on_both_is_two_fresh_runs(kind: str) -> None:
    run = RUNS[kind]
    store = BranchStore(run.model, kv=run.kv, make_caches=run.make_caches)
    left = store.open(PROMPT)
    right = store.fork(left)
    rows: dict[int, list[str]] = {left: [], right: []}
    for place in range(0, len(LEFT), 3):  # in turns, so that one writes where the other has just read
        rows[left] += stepped(store, left, LEFT[place : place + 3])
        rows[right] += stepped(store, right, RIGHT[place : place + 3])
    assert rows[left] == fresh(kind, "left")
    assert rows[right] == fresh(kind, "right")


@pytest.mark.parametrize("kind", RUNS)
def test_both_forks_in_one_step_are_two_fresh_runs_too(kind: str) -> None:
    run = RUNS[kind]
    store = BranchStore(run.model, kv=run.kv, make_caches=run.make_caches)
    left = store.open(PROMPT)
    right = store.fork(left)
    rows: dict[int, list[str]] = {left: [], right: []}
    for pair in zip(LEFT, RIGHT, strict=True):
        store.step_each([(left, pair[0]), (right, pair[1])])
        for handle in (left, right):
            rows[handle].append(bits_of(store.snapshot(handle)))
    assert rows[left] == fresh(kind, "left")
    assert rows[right] == fresh(kind, "right")


@pytest.mark.parametrize("kind", ["plain", "quantized-b4-g32", "rotating", "scan-and-plain", "turboquant"])
def test_forks_grow_past_a_slab_each_for_itself(kind: str) -> None:
    run, prompt = RUNS[kind], random_ids(6, 250)
    store = BranchStore(run.model, kv=run.kv, make_caches=run.make_caches)
    left = store.open(prompt)
    right = store.fork(left)
    for pair in zip(LEFT, RIGHT, strict=True):
        store.step_each([(left, pair[0]), (right, pair[1])])
    for handle, later in ((left, LEFT), (right, RIGHT)):
        alone = run.run([*prompt, *later], rows=len(later) + 1)
        assert bits_of(store.snapshot(handle)) == rows_of(alone)[-1]


def test_a_step_that_mixes_up_two_branches_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    really = forward._together

    def mixed(*arguments: Any) -> list[tuple[mx.array, tuple[Cache, ...]]]:
        fed = really(*arguments)
        return [(row, fed[0][1]) for row, _ in fed]  # the first one's caches for everybody

    monkeypatch.setattr(forward, "_together", mixed)
    with pytest.raises(AssertionError):
        test_both_forks_in_one_step_are_two_fresh_runs_too("plain")


@pytest.mark.parametrize("kind", RUNS)
def test_a_fork_copies_no_array(kind: str) -> None:
    run = RUNS[kind]
    store = BranchStore(run.model, kv=run.kv, make_caches=run.make_caches)
    parent = store.open(PROMPT)
    child = store.fork(parent)
    ours, theirs = store.snapshot(parent), store.snapshot(child)
    assert all(a is b for a, b in zip(ours.caches, theirs.caches, strict=True))
    assert ours.logits_BV is theirs.logits_BV
    assert ours.tokens is theirs.tokens


# What else a branch owns


def chain() -> ChainSampler:
    return ChainSampler(
        chain=Chain(temperature=0.9, top_k=40, xtc_probability=0.5, xtc_threshold=0.01),
        keys=SequentialKeys.of(5),
        processing=Processing(repetition_penalty=1.3, repetition_window=8, frequency_penalty=0.2),
    )


def llama() -> LlamaSampler:
    return LlamaSampler(strategy=SamplingStrategy.lloyal(), prng=Mt19937(5), history=TokenHistoryTracker(16))


def generated(store: BranchStore, handle: int, count: int) -> list[int]:
    ids = []
    for _ in range(count):
        ids.append(store.sample(handle))
        store.step_each([(handle, ids[-1])])
    return ids


@pytest.mark.parametrize("sampler", [chain, llama, GreedySampler])
def test_generator_penalties_and_metrics_fork_with_the_branch(sampler: Callable[[], ChainSampler]) -> None:
    run = RUNS["plain"]
    store = BranchStore(run.model)
    left = store.open(PROMPT, sampler=sampler())
    generated(store, left, 4)
    right = store.fork(left)
    ours = generated(store, left, 12)  # the child has not moved meanwhile
    theirs = generated(store, right, 12)
    assert ours == theirs
    assert store.snapshot(left).metrics == store.snapshot(right).metrics

    alone = BranchStore(run.model)
    whole = generated(alone, alone.open(PROMPT, sampler=sampler()), 16)
    assert whole[4:] == ours


def test_a_generator_that_two_forks_share_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mt19937, "clone", lambda generator: generator)
    store = BranchStore(RUNS["plain"].model)
    left = store.open(PROMPT, sampler=llama())
    right = store.fork(left)
    assert generated(store, left, 12) != generated(store, right, 12)


def test_a_penalties_window_that_two_forks_share_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BranchStore(RUNS["plain"].model)
    left = store.open(PROMPT, sampler=llama())
    before = store.snapshot(store.fork(left)).sampler
    generated(store, left, 3)
    assert isinstance(before, LlamaSampler)
    assert before.history.tokens == ()
    monkeypatch.setattr(TokenHistoryTracker, "clone", lambda history: history)
    generated(store, left, 3)
    sampler = store.snapshot(left).sampler
    generated(store, left, 1)
    assert isinstance(sampler, LlamaSampler)
    assert len(sampler.history.tokens) == 7, "the shared window has moved under a snapshot"


def test_a_fork_without_logits_has_none_until_it_is_fed() -> None:
    store = BranchStore(RUNS["plain"].model)
    parent = store.open(PROMPT)
    child = store.fork(parent, clone_logits=False)
    with pytest.raises(Exception, match="the branch has no logits"):
        store.sample(child)
    store.decode_each([(child, LEFT[0]), (parent, LEFT[0])])
    assert bits_of(store.snapshot(child)) == bits_of(store.snapshot(parent))
