"""Trim then re-append is as if nothing had been forgotten, for every kind that can forget; the others refuse."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.batch_plain import BatchPlainCache
from engine.cache.batch_quantized import BatchQuantizedCache
from engine.cache.batch_rotating import BatchRotatingCache
from engine.cache.chunked import ChunkedCache
from engine.cache.convert import KVMode
from engine.cache.group import CacheGroup
from engine.cache.paged import PagedCache
from engine.cache.plain import PlainCache
from engine.cache.protocol import PackedHeads
from engine.cache.quantized import EmptyQuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.cache.rotating_quantized import RotatingQuantizedCache
from engine.cache.trim import trimmed
from engine.errors import RequestError
from engine.generate import steps
from engine.model import open_model
from parity.models.fetch import ensure_snapshot

Check = Callable[..., None]
Normal = Callable[..., mx.array]

EMPTY = EmptyQuantizedCache(bits=8, group_size=32)
KINDS: dict[str, tuple[Any, int]] = {  # an empty cache, and its rows
    "plain": (PlainCache(), 1),
    "rotating": (RotatingCache(max_size=40), 1),
    "rotating, kept": (RotatingCache(max_size=40, keep=4), 1),
    "quantized": (EMPTY, 1),
    "rotating quantized": (RotatingQuantizedCache.empty(max_size=40, keep=0, bits=8, group_size=32), 1),
    "chunked": (ChunkedCache(chunk_size=64), 1),
    "paged": (PagedCache.empty(blocks=8, block_size=5), 1),
    "batch": (BatchPlainCache.empty([0, 0]), 2),
    "batch rotating": (BatchRotatingCache.empty(40, [0, 0]), 2),
    "batch quantized": (BatchQuantizedCache.empty([0, 0], EMPTY), 2),
}


def heads(normal: Normal, seed: int, rows: int, length: int) -> tuple[mx.array, mx.array]:
    shape = (rows, 2, length, 32)
    return normal(2 * seed, shape), normal(2 * seed + 1, shape)


def arrays(returned: mx.array | PackedHeads) -> tuple[mx.array, ...]:
    return (returned,) if isinstance(returned, mx.array) else (returned.weight, returned.scales, returned.biases)


@pytest.mark.parametrize("kind", KINDS)
@given(before=st.lists(st.integers(1, 9), min_size=1, max_size=3), data=st.data())
@settings(max_examples=12, deadline=None)
def test_trim_then_append_again_is_fresh(
    normal: Normal, same_bits: Check, kind: str, before: list[int], data: st.DataObject
) -> None:
    fresh, rows = KINDS[kind]
    wasted = data.draw(st.integers(1, 9), label="wasted")
    again = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2), label="again")
    for seed, length in enumerate(before):
        fresh = fresh.append(*heads(normal, seed, rows, length))[0]
    cache = fresh.append(*heads(normal, 50, rows, wasted))[0]
    assert cache.trimmable
    cache = cache.trim(wasted)
    assert cache.offset == fresh.offset
    for seed, length in enumerate(again, 100):
        new = heads(normal, seed, rows, length)
        expected_mask, actual_mask = fresh.mask(length), cache.mask(length)
        if isinstance(expected_mask, mx.array):
            same_bits(expected_mask, actual_mask)
        else:
            assert actual_mask == expected_mask
        fresh, *expected = fresh.append(*new)
        cache, *actual = cache.append(*new)
        for one, two in zip(expected, actual, strict=True):
            for a, b in zip(arrays(one), arrays(two), strict=True):
                same_bits(a, b)


@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        (RotatingCache(max_size=6), "rotating-w6-k0"),
        (RotatingCache(max_size=6, keep=2), "rotating-w6-k2"),
        (BatchRotatingCache.empty(6, [0]), "batch-rotating-w6"),
        (RotatingQuantizedCache.empty(max_size=6, keep=0, bits=8, group_size=32), "rotating-quantized-w6-k0-b8-g32"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 4])
def test_a_ring_that_came_round_refuses_and_keeps_what_it_has(
    normal: Normal, cache: Any, kind: str, pieces: int
) -> None:
    for seed in range(12 // pieces):
        cache = cache.append(*heads(normal, seed, 1, pieces))[0]
    assert not cache.trimmable
    with pytest.raises(RequestError) as caught:
        cache.trim(1)
    assert str(caught.value) == (
        "the cache cannot forget its last tokens\n"
        f"  kind    {kind}\n"
        "  tokens  1\n"
        "  reason  what they replaced is gone\n"
        "  next    keep the cache as it was before them, or compute it again"
    )
    assert cache.trim(0).offset == 12


def test_a_state_refuses_and_so_does_a_group_with_one() -> None:
    state = RecurrentCache.empty(2).advanced(mx.zeros((1, 2)), mx.zeros((1, 2)), by=3)
    for cache in (state, CacheGroup(members=(PlainCache(), state))):
        assert not cache.trimmable
        with pytest.raises(RequestError, match="cannot forget its last tokens"):
            cache.trim(1)
        assert cache.trim(0).offset == cache.offset


def test_a_group_forgets_in_every_member(normal: Normal) -> None:
    member = PlainCache().append(*heads(normal, 0, 1, 5))[0]
    group = CacheGroup(members=(member, member)).trim(2)
    assert [m.offset for m in group.members] == [3, 3]


@pytest.mark.parametrize("n", [-1, 6])
def test_more_than_there_is_is_refused_not_cut_down(normal: Normal, n: int) -> None:
    cache = PlainCache().append(*heads(normal, 0, 1, 5))[0]
    with pytest.raises(RequestError) as caught:
        cache.trim(n)
    assert str(caught.value) == (
        "the cache does not hold as many tokens as it is to forget\n"
        "  kind    plain\n"
        "  holds   5\n"
        f"  tokens  {n}\n"
        "  next    forget 0 to 5"
    )


def test_all_layers_forget_or_none(normal: Normal) -> None:
    full = PlainCache().append(*heads(normal, 0, 1, 9))[0]
    ring = RotatingCache(max_size=6).append(*heads(normal, 0, 1, 9))[0]
    with pytest.raises(RequestError) as caught:
        trimmed([full, ring, RecurrentCache.empty(1)], 2)
    assert str(caught.value) == (
        "the caches cannot forget their last tokens\n"
        "  kinds   arrays-1, rotating-w6-k0\n"
        "  tokens  2\n"
        "  reason  what these replaced is gone\n"
        "  next    keep the caches as they were before them, or compute them again"
    )
    assert [cache.offset for cache in trimmed([full, full], 2)] == [7, 7]
    assert trimmed([ring], 0)[0].offset == 9


@pytest.mark.parametrize(
    ("snapshot", "kv"),
    [
        ("llama-tiny", KVMode()),
        ("llama-tiny", KVMode(bits=8, order="from-empty")),
        ("llama-tiny", KVMode(max_size=24)),
        ("llama_sliding-tiny", KVMode()),
        ("gemma3_text-tiny", KVMode(bits=4, group_size=32, order="from-empty")),
        ("deepseek_v32-tiny", KVMode()),
    ],
)
def test_a_model_that_forgot_goes_on_as_one_that_never_knew(same_bits: Check, snapshot: str, kv: KVMode) -> None:
    model, prompt = open_model(ensure_snapshot(snapshot).path, dtype="f32"), [7, 3, 99, 12, 5]
    first, *others = list(steps(model, prompt, num_steps=5, kv=kv))
    caches = trimmed(others[-1].caches, 4)
    *again, _ = steps(model, [first.token_id], num_steps=5, caches=caches, kv=kv)
    for expected, actual in zip(others, again, strict=True):
        same_bits(expected.logits_BV, actual.logits_BV)


@pytest.mark.parametrize(
    ("snapshot", "length"), [("llama_sliding-tiny", 16), ("qwen3_5-tiny", 3), ("lfm2-tiny", 3), ("falcon_h1-tiny", 3)]
)
def test_a_model_that_cannot_forget_says_so_and_keeps_its_caches(snapshot: str, length: int) -> None:
    model = open_model(ensure_snapshot(snapshot).path, dtype="f32")
    (step,) = steps(model, list(range(length)), num_steps=1)
    with pytest.raises(RequestError, match="the caches cannot forget their last tokens"):
        trimmed(step.caches, 1)
    assert step.caches[0].offset == length


def test_a_planted_trim_of_the_offset_alone_is_seen(normal: Normal, other_bits: Check) -> None:
    ring = RotatingCache(max_size=40)
    for seed in range(5):
        ring = ring.append(*heads(normal, seed, 1, 1))[0]
    longer, last = ring.append(*heads(normal, 9, 1, 1))[0], heads(normal, 10, 1, 1)
    wrong = RotatingCache(max_size=40, keys=longer.keys, values=longer.values, offset=5, index=6)
    other_bits(ring.append(*last)[1], wrong.append(*last)[1])
