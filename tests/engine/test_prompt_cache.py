"""The prompt cache: a hit is the longest usable beginning and goes on as a cold run does; bytes, order and namespaces hold."""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import prompt_cache
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.cache.trim import trimmed
from engine.errors import RequestError
from engine.generate import Feed, forced, steps
from engine.prompt_cache import Counters, PromptCache, common_prefix, namespace_of
from tests.engine.tiny_runs import RUNS, random_ids, rows_of

STORED = random_ids(1, 30)


def caches_of(kind: str, ids: Sequence[int]) -> tuple[Cache, ...]:
    return RUNS[kind].run(list(ids), rows=1)[-1].caches


# A hit is a cold run


@pytest.mark.parametrize("kind", ["plain", "plain-bf16"])
@pytest.mark.parametrize("shared", [1, 17, 29, 30])
def test_a_hit_goes_on_as_a_cold_run_whatever_its_length(kind: str, shared: int) -> None:
    run, cache = RUNS[kind], PromptCache()
    cache.put(STORED, caches_of(kind, STORED))
    prompt = [*STORED[:shared], *random_ids(2, 9)]
    hit = cache.take(prompt)
    assert hit is not None
    assert hit.num_tokens == shared
    warm = run.run(prompt[shared:], rows=4, caches=hit.caches)
    assert rows_of(warm) == rows_of(run.run(prompt, rows=4))


@pytest.mark.parametrize("kind", RUNS)
def test_a_hit_goes_on_as_a_cold_run_that_was_fed_in_the_same_pieces(kind: str) -> None:
    run, cache = RUNS[kind], PromptCache()
    cache.put(STORED, caches_of(kind, STORED))
    rest = random_ids(2, 9)
    hit = cache.take([*STORED, *rest])
    assert hit is not None
    assert hit.num_tokens == 30
    warm = list(steps(run.model, rest, num_steps=4, pick=forced([1, 2, 3, 4]), kv=run.kv, caches=hit.caches))
    cold = run.run(STORED, rows=1)[-1].caches
    cold_run = steps(run.model, rest, num_steps=4, pick=forced([1, 2, 3, 4]), kv=run.kv, caches=cold)
    assert rows_of(warm) == rows_of(list(cold_run))


def test_a_hit_that_is_cut_back_too_little_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "trimmed", lambda caches, count: trimmed(caches, max(count - 1, 0)))
    with pytest.raises(AssertionError):
        test_a_hit_goes_on_as_a_cold_run_whatever_its_length("plain", 17)


def test_the_same_prompt_again_leaves_its_last_token_to_feed() -> None:
    run, cache = RUNS["plain"], PromptCache()
    cache.put(STORED, caches_of("plain", STORED))
    hit = cache.take(STORED)
    assert hit is not None
    assert hit.num_tokens == 29
    warm = run.run(STORED[29:], rows=1, caches=hit.caches)
    assert rows_of(warm) == rows_of(run.run(STORED, rows=1))


def test_what_a_hit_becomes_does_not_reach_the_store() -> None:
    run, cache = RUNS["plain"], PromptCache()
    cache.put(STORED, caches_of("plain", STORED))
    prompt = [*STORED, *random_ids(7, 5)]
    first = cache.take(prompt)
    assert first is not None
    rows = rows_of(run.run(prompt[30:], rows=5, caches=first.caches))
    second = cache.take(prompt)
    assert second is not None
    assert rows_of(run.run(prompt[30:], rows=5, caches=second.caches)) == rows


# What can be used


def plain(length: int) -> Cache:
    new = mx.ones((1, 1, length, 2))
    return PlainCache().append(new, new)[0]


def ring(length: int, size: int = 8) -> Cache:
    new = mx.ones((1, 1, length, 2))
    return RotatingCache(max_size=size).append(new, new)[0]


def state(length: int) -> Cache:
    return RecurrentCache(state=(mx.ones((1, 4)),), offset=length)


def hit_of(cache: PromptCache, prompt: Sequence[int], namespace: str = "") -> int:
    hit = cache.take(prompt, namespace=namespace)
    if hit is not None:
        assert {c.offset for c in hit.caches} == {hit.num_tokens}
    return 0 if hit is None else hit.num_tokens


def test_a_ring_that_has_turned_is_used_whole_or_not_at_all() -> None:
    cache = PromptCache()
    cache.put(range(10), [plain(10), ring(10)])
    assert hit_of(cache, range(12)) == 10
    assert hit_of(cache, [0, 1, 2, 99]) == 0
    assert hit_of(cache, range(10)) == 0, "the last token must be left, and the ring cannot give it back"


def test_a_ring_that_has_not_turned_is_cut_back() -> None:
    cache = PromptCache()
    cache.put(range(5), [plain(5), ring(5)])
    assert hit_of(cache, [0, 1, 2, 99]) == 3


def test_a_recurrent_state_is_used_whole_or_not_at_all() -> None:
    cache = PromptCache()
    cache.put(range(6), [state(6), plain(6)])
    assert hit_of(cache, range(5)) == 0
    assert hit_of(cache, range(7)) == 6


def test_the_longest_beginning_wins_over_a_longer_entry() -> None:
    cache = PromptCache()
    cache.put([1, 2, 3, 9, 9, 9, 9], [plain(7)])
    cache.put([1, 2, 3, 4, 5], [plain(5)])
    assert hit_of(cache, [1, 2, 3, 4, 5, 6]) == 5


def test_an_untrimmable_entry_does_not_hide_a_usable_one() -> None:
    cache = PromptCache()
    cache.put([1, 2, 3, 4, 9], [state(5)])
    cache.put([1, 2], [state(2)])
    assert hit_of(cache, [1, 2, 3, 4, 5]) == 2


def test_of_two_that_give_equally_much_the_earlier_is_used() -> None:
    cache = PromptCache()
    cache.put([1, 2, 7], [plain(3)])
    cache.put([1, 2, 8], [plain(3)])
    cache.take([1, 2, 5])  # uses the first, which is now the most recent
    kept = PromptCache(max_bytes=cache.num_bytes)
    kept.put([1, 2, 7], [plain(3)])
    kept.put([1, 2, 8], [plain(3)])
    kept.take([1, 2, 5])
    kept.put([4, 4, 4], [plain(3)])  # the second goes
    assert hit_of(kept, [1, 2, 7, 0]) == 3
    assert hit_of(kept, [1, 2, 8, 0]) == 2


def test_namespaces_are_apart() -> None:
    cache = PromptCache()
    cache.put(range(6), [plain(6)], namespace="french")
    assert hit_of(cache, range(8)) == 0
    assert hit_of(cache, range(8), "french+upper") == 0
    assert hit_of(cache, range(8), "french") == 6
    cache.put(range(7), [plain(7)])
    assert len(cache) == 2, "an entry of another namespace is not replaced"


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_hit_is_the_longest_beginning_that_any_entry_has(prompts: list[list[int]], data: st.DataObject) -> None:
    cache = PromptCache()
    for prompt in prompts:
        cache.put(prompt, [plain(len(prompt))])
    asked = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    best = max(min(common_prefix(prompt, asked), len(asked) - 1) for prompt in prompts)
    assert hit_of(cache, asked) == best


# Bytes, order, counters


def test_an_entry_holds_the_bytes_of_its_arrays() -> None:
    cache = PromptCache()
    caches = [plain(5), ring(5), state(5)]
    cache.put(range(5), caches)
    assert cache.num_bytes == sum(a.nbytes for c in caches for a in c.arrays) == 2 * 256 * 8 + 2 * 5 * 8 + 16


def test_the_least_recently_used_goes_first_and_the_cap_holds() -> None:
    one = plain(3).arrays[0].nbytes * 2
    cache = PromptCache(max_bytes=3 * one)
    for first in range(3):
        assert cache.put([first, 7, 7], [plain(3)])
    cache.take([0, 7, 7, 7])
    cache.put([3, 7, 7], [plain(3)])
    assert [hit_of(cache, [first, 7, 7, 7]) for first in range(4)] == [3, 0, 3, 3]
    assert cache.num_bytes == 3 * one
    assert cache.counters.evicted == 1


def test_what_alone_exceeds_the_cap_is_not_kept_and_evicts_nothing() -> None:
    cache = PromptCache(max_bytes=100)
    assert cache.put([1, 2], [state(2)])
    assert not cache.put([5, 6, 7], [plain(3)])
    assert (len(cache), cache.counters.too_large) == (1, 1)
    assert not PromptCache(max_bytes=0).put([1], [state(1)])


def test_a_longer_entry_replaces_its_beginnings_only_where_it_can_be_cut_back() -> None:
    cache = PromptCache()
    cache.put([1, 2], [plain(2)])
    cache.put([1, 2, 3], [plain(3)])
    assert len(cache) == 1
    states = PromptCache()
    states.put([1, 2], [state(2)])
    states.put([1, 2, 3], [state(3)])
    states.put([1, 2, 3], [state(3)])
    assert len(states) == 2
    assert (cache.counters.superseded, states.counters.superseded) == (1, 1)


def test_hits_and_misses_are_counted() -> None:
    cache = PromptCache()
    cache.put(range(6), [plain(6)])
    for prompt in (range(8), range(3), [9, 9], [0]):
        cache.take(list(prompt))
    assert cache.counters == Counters(hits=2, misses=2, tokens=8)


def test_an_entry_can_be_handed_over() -> None:
    cache = PromptCache()
    cache.put(range(6), [plain(6)])
    hit = cache.take(range(8), keep=False)
    assert hit is not None
    assert (len(cache), cache.num_bytes, hit_of(cache, range(8))) == (0, 0, 0)
    cache.put(range(6), [plain(6)])
    cache.clear()
    assert (len(cache), cache.counters.hits) == (0, 1)


# Refusals


@pytest.mark.parametrize(
    ("tokens", "caches", "seen"), [([1, 2], [3], "3 seen"), ([], [], " seen"), ([1], [1, 2], "1, 2")]
)
def test_tokens_that_are_not_those_in_the_caches_are_refused(tokens: list[int], caches: list[int], seen: str) -> None:
    with pytest.raises(RequestError) as caught:
        PromptCache().put(tokens, [plain(length) for length in caches])
    assert str(caught.value).startswith(f"the tokens are not those in the caches\n  tokens  {len(tokens)}\n  caches  ")
    assert seen in str(caught.value)


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        PromptCache(max_bytes=-1)
    assert str(caught.value) == (
        "a prompt cache cannot hold less than nothing\n  max bytes  -1\n  next       use 0 to switch it off"
    )


def test_adapters_name_their_namespace() -> None:
    assert (namespace_of([]), namespace_of(["upper", "french"])) == ("", "upper+french")
    with pytest.raises(RequestError) as caught:
        namespace_of(["a+b"])
    assert str(caught.value) == "not the name of an adapter\n  given  'a+b'\n  next   use names without +"


def test_a_prompt_in_pieces_of_the_hits_length_is_the_cold_run_of_a_state() -> None:
    """Where bits depend on the pieces, the same pieces give them: the claim of the module, on a whole cold run."""
    run, cache = RUNS["recurrent"], PromptCache()
    stored = list(steps(run.model, STORED, num_steps=1, pick=forced([0]), feed=Feed(whole=True), kv=run.kv))[-1]
    cache.put(STORED, stored.caches)
    prompt = [*STORED, *random_ids(3, 31)]
    hit = cache.take(prompt)
    assert hit is not None
    warm = steps(
        run.model, prompt[30:], num_steps=1, pick=forced([0]), feed=Feed(piece=30), kv=run.kv, caches=hit.caches
    )
    cold = steps(run.model, prompt, num_steps=1, pick=forced([0]), feed=Feed(piece=30), kv=run.kv)
    assert rows_of(list(warm)) == rows_of(list(cold))
