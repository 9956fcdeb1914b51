"""The chunked cache: a plain one until its front is dropped, then the last positions alone."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.chunked import ChunkedCache
from engine.cache.plain import PlainCache
from engine.errors import RequestError
from engine.generate import steps
from engine.model import CausalModel

Check = Callable[..., None]
Normal = Callable[..., mx.array]


def heads(normal: Normal, seed: int, length: int) -> tuple[mx.array, mx.array]:
    return normal(2 * seed, (1, 2, length, 4)), normal(2 * seed + 1, (1, 2, length, 3))


@given(
    pattern=st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 3)), min_size=1, max_size=10),
    chunk_size=st.integers(1, 24),
)
@settings(max_examples=40, deadline=None)
def test_it_returns_a_plain_caches_positions_from_its_start_on(
    normal: Normal, same_bits: Check, pattern: list[tuple[int, bool, int]], chunk_size: int
) -> None:
    plain, cache, start = PlainCache(), ChunkedCache(chunk_size=chunk_size), 0
    for seed, (length, drops, forgets) in enumerate(pattern):
        if drops:
            cache, start = cache.trim_front(), max(start, plain.offset - chunk_size)
        n = min(forgets, plain.offset - start)
        plain, cache = plain.trim(n), cache.trim(n)
        new = heads(normal, seed, length)
        plain, *expected = plain.append(*new)
        cache, *actual = cache.append(*new)
        assert (cache.offset, cache.start) == (plain.offset, start)
        for one, two in zip(expected, actual, strict=True):
            same_bits(one[:, :, start:], two)


def test_its_front_stays_until_it_is_dropped_and_then_holds_a_chunk(normal: Normal) -> None:
    cache = ChunkedCache(chunk_size=4).append(*heads(normal, 0, 10))[0]
    assert (cache.held, cache.trim_front().held, cache.trim_front().start) == (10, 4, 6)
    assert cache.held == 10
    assert cache.trim_front().trim_front() is not None
    assert ChunkedCache(chunk_size=4).trim_front().held == 0


def test_the_mask_is_over_what_is_held(normal: Normal) -> None:
    cache = ChunkedCache(chunk_size=4).append(*heads(normal, 0, 10))[0].trim_front()
    assert cache.mask(1) is None
    assert cache.mask(3) == "causal"
    mask = cache.mask(3, as_array=True)
    assert isinstance(mask, mx.array)
    assert mask.shape == (3, 7)


def test_a_model_gives_the_same_rows_while_nothing_is_dropped(
    llama: Callable[..., CausalModel], same_bits: Check
) -> None:
    model = llama()
    caches = [ChunkedCache(chunk_size=4) for _ in model.make_caches()]
    plain = steps(model, [3, 1, 4, 1, 5, 9, 2, 6], num_steps=4)
    for expected, actual in zip(plain, steps(model, [3, 1, 4, 1, 5, 9, 2, 6], num_steps=4, caches=caches), strict=True):
        same_bits(expected.logits_BV, actual.logits_BV)


def test_it_cannot_forget_more_than_it_holds(normal: Normal) -> None:
    cache = ChunkedCache(chunk_size=4).append(*heads(normal, 0, 10))[0].trim_front()
    with pytest.raises(RequestError) as caught:
        cache.trim(5)
    assert str(caught.value) == (
        "the cache does not hold as many tokens as it is to forget\n"
        "  kind    chunked-c4\n"
        "  holds   4\n"
        "  tokens  5\n"
        "  next    forget 0 to 4"
    )


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        ChunkedCache(chunk_size=0)
    assert str(caught.value) == "a chunk needs at least one position\n  chunk size  0\n  next        use 1 or more"
