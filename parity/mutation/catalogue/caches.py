"""Faults of what is remembered: positions that are counted wrongly, buffers and rings that lose some."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx

from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import swap

O_PROJ: Final = "model.layers.0.self_attn.o_proj"
Method = Callable[..., Any]


def appended(change: Callable[[Any], Any]) -> Callable[[Method], Method]:
    """An `append` whose new cache is changed."""

    def by(right: Method) -> Method:
        def wrong(self: Any, keys: mx.array, values: mx.array) -> Any:  # noqa: ANN401 - a method of a cache
            cache, *heads = right(self, keys, values)
            return change(cache), *heads

        return wrong

    return by


def one_further(cache: Any) -> Any:  # noqa: ANN401 - a cache
    """A cache that counts one position too many."""
    return replace(cache, offset=cache.offset + 1)


def one_behind(cache: Any) -> Any:  # noqa: ANN401 - a cache
    """A cache that counts one position too few, so that the next one overwrites the last."""
    return replace(cache, offset=cache.offset - 1)


def keys_and_values_exchanged(right: Method) -> Method:
    """Values are kept where keys belong, and keys where values do."""
    return lambda self, keys, values: right(self, values, keys)


def single_not_written(right: Method) -> Method:
    """A single new position is written as zeros."""

    def wrong(buffer: mx.array | None, used: int, new: mx.array) -> Any:  # noqa: ANN401 - an mx.array
        return right(buffer, used, new if not used or new.shape[2] > 1 else mx.zeros_like(new))

    return wrong


def cut_too_short(right: Method) -> Method:
    """A buffer that grows loses its last position."""

    def wrong(buffer: mx.array | None, used: int, new: mx.array) -> Any:  # noqa: ANN401 - an mx.array
        if buffer is not None and used + new.shape[2] > buffer.shape[2]:
            last = mx.arange(buffer.shape[2])[:, None] == used - 1
            buffer = mx.where(last, mx.zeros_like(buffer), buffer)
        return right(buffer, used, new)

    return wrong


LONG: Final = ("llama-tiny/f32/fp/forced/p300-mutation-chunk64",)
LONG_PACKED: Final = ("llama-tiny/f32/kv8-g64/forced/p300-mutation-chunk64",)

OFFSET: Final = tuple(
    fault("cache offset", part, what, says=says, at=at, cases=cases, plant=plant)
    for part, what, says, at, cases, plant in (
        (
            "plain",
            "one-too-many",
            "a plain cache counts one position too many",
            O_PROJ,
            taps("llama"),
            swap("engine.cache.plain:PlainCache.append", appended(one_further)),
        ),
        (
            "plain",
            "one-too-few",
            "a plain cache counts one position too few",
            O_PROJ,
            taps("qwen3"),
            swap("engine.cache.plain:PlainCache.append", appended(one_behind)),
        ),
        (
            "plain",
            "keys-for-values",
            "keys and values are kept in each other's place",
            O_PROJ,
            taps("mixtral"),
            swap("engine.cache.plain:PlainCache.append", keys_and_values_exchanged),
        ),
        (
            "plain",
            "single-position-not-written",
            "a single new position is kept as zeros",
            O_PROJ,
            taps("llama"),
            swap("engine.cache.plain:grown", single_not_written),
        ),
        (
            "plain",
            "growing-loses-the-last",
            "a buffer that grows by a slab loses its last position",
            O_PROJ,
            LONG,
            swap("engine.cache.plain:grown", cut_too_short),
        ),
        (
            "packed",
            "growing-loses-the-last",
            "a packed buffer that grows by a slab loses its last position",
            O_PROJ,
            LONG_PACKED,
            swap("engine.cache.quantized:grown", cut_too_short),
        ),
        (
            "packed",
            "one-too-few",
            "a packed cache counts one position too few",
            O_PROJ,
            taps("llama", kv="kv8-g64"),
            swap("engine.cache.quantized:QuantizedCache.append", appended(one_behind)),
        ),
        (
            "rotating",
            "one-too-many",
            "a ring counts one position too many",
            O_PROJ,
            taps("llama_sliding"),
            swap("engine.cache.rotating:RotatingCache.append", appended(one_further)),
        ),
        (
            "rotating",
            "window-only",
            "a ring's positions start again at its size",
            O_PROJ,
            taps("gemma3_text"),
            swap(
                "engine.cache.rotating:RotatingCache.append",
                appended(lambda cache: replace(cache, offset=min(cache.offset, cache.max_size))),
            ),
        ),
        (
            "latent",
            "one-too-many",
            "a cache of latents counts one position too many",
            "model.layers.0.self_attn.o_proj",
            taps("minicpm3"),
            swap("engine.cache.plain:PlainCache.append", appended(one_further)),
        ),
    )
)


def joined_as_it_lies(right: Method) -> Method:
    """A ring that has come round is not straightened before several positions are appended."""

    def wrong(self: Any, old: mx.array | None, new: mx.array) -> Any:  # noqa: ANN401 - a method of a cache
        if old is None:
            return right(self, old, new)
        return mx.concatenate([self._without(old, old.shape[2] - self.max_size + 1), new], axis=2)

    return wrong


def oldest_lost(right: Method) -> Method:
    """A cut that takes one position too many; its slot is there and empty."""

    def wrong(self: Any, buffer: mx.array, count: int) -> Any:  # noqa: ANN401 - a method of a cache
        cut = right(self, buffer, count)
        return cut if count <= 0 else mx.where(mx.arange(cut.shape[2])[:, None] == 0, mx.zeros_like(cut), cut)

    return wrong


def next_lost(right: Method) -> Method:
    """A ring that empties the slot that the next single position will overwrite."""

    def wrong(self: Any, *new: mx.array) -> Any:  # noqa: ANN401 - a method of a cache
        index, buffers = right(self, *new)
        empty = mx.arange(self.max_size)[:, None] == index % self.max_size
        return index, tuple(mx.where(empty, mx.zeros_like(buffer), buffer) for buffer in buffers)

    return wrong


def one_too_long(right: Method) -> Method:
    """A cut that leaves one position too many."""
    return lambda self, buffer, count: right(self, buffer, count - 1)


def slots_one_off(right: Method) -> Method:
    """A ring whose slots are moved on by one after each single position."""

    def wrong(self: Any, *new: mx.array) -> Any:  # noqa: ANN401 - a method of a cache
        index, buffers = right(self, *new)
        return index, tuple(mx.roll(buffer, 1, 2) for buffer in buffers)

    return wrong


IN_PIECES: Final = "the last token is fed alone: it learns of what the pieces before it saw a layer later"

TRIM: Final = tuple(
    fault(
        "trim",
        part,
        what,
        says=says,
        at=at,
        cases=cases,
        plant=plant,
        hidden=IN_PIECES if what.endswith("in-pieces") else "",
    )
    for part, what, says, at, cases, plant in (
        (
            "rotating",
            "one-step-early",
            "a ring loses its oldest position one step early",
            O_PROJ,
            taps("llama_sliding"),
            swap("engine.cache.rotating:RotatingCache._written", next_lost),
        ),
        (
            "rotating",
            "one-too-few",
            "a ring is cut one position too long",
            O_PROJ,
            taps("llama_sliding"),
            swap("engine.cache.rotating:RotatingCache._without", one_too_long),
        ),
        (
            "rotating",
            "never",
            "a ring is never cut",
            O_PROJ,
            taps("gemma3_text"),
            swap("engine.cache.rotating:RotatingCache._without", lambda _: lambda self, buffer, count: buffer),  # noqa: ARG005
        ),
        (
            "rotating",
            "newest-first",
            "a ring loses its newest positions, not its oldest",
            O_PROJ,
            taps("gpt_oss"),
            swap(
                "engine.cache.rotating:RotatingCache._without",
                lambda _: lambda self, buffer, count: buffer[:, :, : buffer.shape[2] - max(count, 0)],  # noqa: ARG005
            ),
        ),
        (
            "rotating",
            "one-more-in-pieces",
            "a ring is cut one position too short while a prompt is fed in pieces",
            O_PROJ,
            taps("gemma3_text", feed="chunk7"),
            swap("engine.cache.rotating:RotatingCache._without", oldest_lost),
        ),
        (
            "rotating",
            "slots-one-off",
            "a ring's slots are moved on by one after each single position",
            O_PROJ,
            taps("llama_sliding"),
            swap("engine.cache.rotating:RotatingCache._written", slots_one_off),
        ),
    )
)


FAULTS: Final[tuple[Fault, ...]] = (*OFFSET, *TRIM)
