"""The paged cache: the plain cache's bits for any pattern of appends, its stack of free blocks, and what it refuses."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.paged import PagedCache, paged
from engine.cache.paged import _gathered as gathered
from engine.cache.plain import PlainCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError
from engine.generate import Feed, steps
from engine.model import CausalModel

Check = Callable[..., None]
Normal = Callable[..., mx.array]
Llama = Callable[..., CausalModel]


def heads(normal: Normal, seed: int, length: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return normal(2 * seed, (1, 2, length, 4), dtype), normal(2 * seed + 1, (1, 2, length, 3), dtype)


@given(
    pattern=st.lists(st.integers(-12, 12).filter(bool), min_size=1, max_size=12),
    block_size=st.integers(1, 9),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_for_any_pattern_of_appends_and_trims_it_returns_what_a_plain_cache_returns(
    normal: Normal, same_bits: Check, pattern: list[int], block_size: int, dtype: mx.Dtype
) -> None:
    plain, other = PlainCache(), PagedCache.empty(blocks=-(-144 // block_size), block_size=block_size)
    for seed, n in enumerate(pattern):
        if n < 0:
            back = min(-n, plain.offset)
            plain, other = plain.trim(back), other.trim(back)
            continue
        new = heads(normal, seed, n, dtype)
        plain, *expected = plain.append(*new)
        other, *actual = other.append(*new)
        for one, two in zip(expected, actual, strict=True):
            same_bits(one, two)
        assert other.offset == plain.offset
        assert len(other.table) == -(-other.offset // block_size)
        assert sorted(other.table + other.free) == list(range(other.blocks))


def test_blocks_are_a_stack_what_is_given_back_last_is_taken_first(normal: Normal) -> None:
    cache = PagedCache.empty(blocks=5, block_size=2).append(*heads(normal, 0, 6))[0]
    assert (cache.table, cache.free) == ((0, 1, 2), (4, 3))

    cache = cache.trim(3)
    assert (cache.table, cache.free) == ((0, 1), (4, 3, 2))
    cache = cache.trim(3)
    assert (cache.table, cache.free, cache.offset) == ((), (4, 3, 2, 1, 0), 0)

    cache = cache.append(*heads(normal, 1, 3))[0]
    assert cache.table == (0, 1)


def test_a_block_that_is_taken_again_shows_nothing_of_what_was_in_it(normal: Normal, same_bits: Check) -> None:
    cache = PagedCache.empty(blocks=2, block_size=4).append(*heads(normal, 0, 8))[0].trim(8)
    new = heads(normal, 1, 2)
    _, keys, values = cache.append(*new)
    same_bits(new[0], keys)
    same_bits(new[1], values)


def test_an_exhausted_pool_is_told_and_nothing_is_lost(normal: Normal, same_bits: Check) -> None:
    cache, keys, _ = PagedCache.empty(blocks=2, block_size=4).append(*heads(normal, 0, 7))
    with pytest.raises(RequestError) as caught:
        cache.append(*heads(normal, 1, 2))
    assert str(caught.value) == (
        "the pool of the paged cache is exhausted\n"
        "  blocks      2\n"
        "  block size  4\n"
        "  holds       7\n"
        "  tokens      2\n"
        "  next        make it of at least 3 blocks"
    )
    last = heads(normal, 2, 1)
    same_bits(mx.concatenate([keys, last[0]], axis=2), cache.append(*last)[1])


def test_a_fork_shares_the_pool_and_both_go_on_by_themselves(normal: Normal, same_bits: Check) -> None:
    start = PagedCache.empty(blocks=3, block_size=2).append(*heads(normal, 0, 3))[0]
    one, two = heads(normal, 1, 1), heads(normal, 2, 1)
    first, keys, _ = start.append(*one)
    other, others, _ = start.append(*two)
    same_bits(one[0], keys[:, :, 3:])
    same_bits(two[0], others[:, :, 3:])
    same_bits(keys[:, :, :3], others[:, :, :3])
    assert (first.offset, other.offset, start.offset) == (4, 4, 3)


@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_a_model_gives_the_same_rows_on_paged_caches(llama: Llama, same_bits: Check, block_size: int) -> None:
    model, prompt = llama(), [5, 9, 2, 77, 30, 8, 1, 2, 3]
    feed = Feed(piece=4)
    caches = paged(model.make_caches(), tokens=len(prompt) + 8, block_size=block_size)
    plain = [step.logits_BV for step in steps(model, prompt, num_steps=8, feed=feed)]
    other = list(steps(model, prompt, num_steps=8, feed=feed, caches=caches))
    for expected, step in zip(plain, other, strict=True):
        same_bits(expected, step.logits_BV)
    assert {cache.kind for cache in other[-1].caches} == {f"paged-b{block_size}"}


def test_room_for_a_run_is_room_for_all_of_it(llama: Llama) -> None:
    model = llama()
    caches = paged(model.make_caches(), tokens=8, block_size=4)
    list(steps(model, [1, 2, 3, 4, 5], num_steps=4, caches=caches))
    with pytest.raises(RequestError, match="exhausted"):
        list(steps(model, [1, 2, 3, 4, 5], num_steps=5, caches=caches))


def test_rings_and_states_are_not_paged() -> None:
    kinds = [
        cache.kind for cache in paged([RotatingCache(max_size=8), PlainCache(), RecurrentCache.empty(1)], tokens=9)
    ]
    assert kinds == ["rotating-w8-k0", "paged-b256", "arrays-1"]


@pytest.mark.parametrize(
    ("caches", "kinds", "tokens"),
    [([RotatingCache(max_size=8)], "rotating-w8-k0", 0), ([PlainCache(offset=3)], "plain", 3)],
)
def test_caches_that_cannot_be_paged_are_refused(caches: list[Any], kinds: str, tokens: int) -> None:
    with pytest.raises(RequestError) as caught:
        paged(caches, tokens=8)
    assert str(caught.value) == (
        "the model's caches cannot be paged\n"
        f"  kinds   {kinds}\n"
        f"  tokens  {tokens}\n"
        "  next    page a model's own empty caches, of which at least one is plain"
    )


@pytest.mark.parametrize(("blocks", "block_size"), [(0, 4), (2, 0), (-1, 4)])
def test_a_pool_of_nothing_is_refused(blocks: int, block_size: int) -> None:
    with pytest.raises(RequestError) as caught:
        PagedCache.empty(blocks=blocks, block_size=block_size)
    assert str(caught.value) == (
        "a paged cache needs a block, and a block a position\n"
        f"  blocks      {blocks}\n"
        f"  block size  {block_size}\n"
        "  next        use 1 or more of each"
    )


def test_two_sequences_are_refused(normal: Normal) -> None:
    two = normal(0, (2, 1, 1, 4))
    with pytest.raises(RequestError) as caught:
        PagedCache.empty(blocks=1).append(two, two)
    assert str(caught.value) == ("a paged cache holds one sequence\n  rows  2\n  next  use a plain or a batch cache")


def test_a_planted_slip_in_the_table_is_seen(
    normal: Normal, other_bits: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = heads(normal, 0, 6)
    right = PagedCache.empty(blocks=3, block_size=2).append(*new)[1]
    monkeypatch.setattr("engine.cache.paged._gathered", lambda pool, table: gathered(pool, table[::-1]))
    other_bits(right, PagedCache.empty(blocks=3, block_size=2).append(*new)[1])
