"""Faults of what a query may see: masks, windows, and positions that are not there.

A golden records the last position. Where a prompt is fed whole, that position shows its own mask; where a mask hides or shows
positions to earlier queries only, the last one learns of it a layer later, and the fault is not localised.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx

from engine.mask import causal_matrix
from parity.mutation.changes import to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap

AHEAD: Final = "the last position sees all others rightly: it learns of the fault a layer later, through their keys"
O_PROJ: Final = "model.layers.0.self_attn.o_proj"
MaskOf = Callable[..., Any]


def not_itself(L: int, *, before: int, window: int | None = None) -> mx.array:
    """A query sees what is before it, and itself only where nothing is."""
    query, key = mx.arange(before, before + L)[:, None], mx.arange(before + L)[None]
    return (causal_matrix(L, before=before, window=window) & (query > key)) | (key == 0)


def one_ahead(L: int, *, before: int, window: int | None = None) -> mx.array:
    """A query sees the position after it too."""
    query, key = mx.arange(before, before + L)[:, None], mx.arange(before + L)[None]
    return causal_matrix(L, before=before, window=window) | (key == query + 1)


def not_the_first(L: int, *, before: int, window: int | None = None) -> mx.array:
    """Nobody but the first position sees it."""
    query, key = mx.arange(before, before + L)[:, None], mx.arange(before + L)[None]
    return causal_matrix(L, before=before, window=window) & ((key > 0) | (query == 0))


def growing(matrix: Callable[..., mx.array]) -> Callable[[MaskOf], MaskOf]:
    """A growing cache's mask by another matrix."""

    def by(_: MaskOf) -> MaskOf:
        return lambda L, *, offset, window, as_array: matrix(L, before=offset, window=window)  # noqa: ARG005

    return by


def other_window(by: int | None) -> Callable[[MaskOf], MaskOf]:
    """The causal matrix with a window `by` wider; with None without one."""

    def change(right: MaskOf) -> MaskOf:
        return lambda L, *, before, window: right(
            L, before=before, window=None if by is None or window is None else window + by
        )

    return change


MASK: Final = (
    *(
        fault(
            "mask",
            model,
            what,
            says=says,
            at=O_PROJ,
            cases=taps(model, feed=feed),
            plant=swap("engine.cache.plain:growing_mask", growing(matrix)),
            hidden=AHEAD if matrix is one_ahead else "",
        )
        for model, what, feed, says, matrix in (
            ("llama", "not-itself", "whole", "a query does not see its own position", not_itself),
            ("llama", "not-the-first", "whole", "the first position is hidden from all others", not_the_first),
            ("llama", "one-ahead", "whole", "a query sees one position ahead", one_ahead),
            ("qwen2", "not-itself-in-decode", "tail-split", "a query does not see its own position", not_itself),
            ("gemma2", "not-the-first-in-decode", "tail-split", "the first position is hidden", not_the_first),
            ("granite", "not-itself-in-decode", "tail-split", "a query does not see its own position", not_itself),
        )
    ),
    fault(
        "mask",
        "llama",
        "none",
        says="a prompt is fed without a mask",
        at=O_PROJ,
        cases=taps("llama", feed="whole"),
        plant=swap("engine.cache.plain:growing_mask", lambda _: lambda *_, **__: None),
        hidden=AHEAD,
    ),
    fault(
        "mask",
        "llama",
        "of-the-piece-alone",
        says="the mask of a piece forgets the pieces before it",
        at=O_PROJ,
        cases=taps("llama", feed="chunk7"),
        plant=swap(
            "engine.cache.plain:growing_mask",
            lambda right: (
                lambda L, *, offset, window, as_array: (
                    right(L, offset=offset, window=window, as_array=as_array)
                    if L == 1 or not offset
                    else mx.concatenate([mx.zeros((L, offset), mx.bool_), causal_matrix(L, before=0)], axis=1)
                )
            ),
        ),
        hidden=AHEAD,
    ),
    fault(
        "mask",
        "gemma3_text",
        "full-layer-not-itself",
        says="a query of the full layer does not see its own position",
        at="model.layers.2.self_attn.o_proj",
        cases=taps("gemma3_text", feed="whole"),
        plant=swap("engine.cache.plain:growing_mask", growing(not_itself)),
    ),
    fault(
        "mask",
        "packed",
        "not-the-first",
        says="over packed keys nobody sees the first position",
        at=O_PROJ,
        cases=taps("llama", kv="kv8-g64"),
        plant=swap("engine.cache.quantized:growing_mask", growing(not_the_first)),
    ),
    fault(
        "mask",
        "deepseek_v3",
        "reconstructed-not-itself",
        says="over reconstructed keys a query does not see its own position",
        at=O_PROJ,
        cases=taps("deepseek_v3", feed="whole"),
        plant=swap("engine.cache.plain:growing_mask", growing(not_itself)),
    ),
)

WINDOW: Final = (
    *(
        fault(
            "window",
            model,
            what,
            says=says,
            at=O_PROJ,
            cases=taps(model, feed="whole"),
            plant=swap("engine.cache.rotating:causal_matrix", other_window(by)),
        )
        for model in ("llama_sliding", "gemma3_text")
        for what, by, says in (
            ("one-more", 1, "a query of a windowed layer sees one position too many"),
            ("one-less", -1, "a query of a windowed layer sees one position too few"),
            ("none", None, "the window is ignored while a prompt is fed"),
        )
    ),
    *(
        fault(
            "window",
            model,
            f"layer-{layer}-{'none' if window is None else f'of-{window}'}",
            says=f"layer {layer} {'has no window' if window is None else f'has a window of {window}'}",
            at="cache",
            cases=taps(model),
            plant=edit(f"blocks.{layer}.attention.window", to(window)),
        )
        for model, layer, window in (
            ("llama_sliding", 0, None),
            ("llama_sliding", 1, 16),
            ("llama_sliding", 2, 17),
            ("gemma3_text", 0, 15),
            ("gpt_oss", 1, 16),
            ("cohere2", 3, 16),
        )
    ),
    fault(
        "window",
        "gpt_oss",
        "half",
        says="windowed layers see half of their window while a prompt is fed",
        at=O_PROJ,
        cases=taps("gpt_oss"),
        plant=swap("engine.cache.rotating:causal_matrix", other_window(-8)),
        hidden=AHEAD,
    ),
)


def seen_slots(more: int | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Keys and values with so many slots that are not used yet; None for all of the buffer's."""

    def by(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, keys: mx.array, values: mx.array) -> Any:  # noqa: ANN401 - a method of a cache
            cache, _, _ = right(self, keys, values)
            end = None if more is None else cache.offset + more
            return cache, cache.keys[:, :, :end], cache.values[:, :, :end]

        return wrong

    return by


def repeated_edge(right: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution that sees the first position before the beginning, where zeros belong."""

    def wrong(self: Any, x: mx.array, state: mx.array | None, *rest: Any) -> Any:  # noqa: ANN401 - a method of a layer
        if state is None:
            state = mx.repeat(x[:, :1], self.weight.shape[1] - 1, axis=1)
        return right(self, x, state, *rest)

    return wrong


PADDING: Final = (
    fault(
        "padding",
        "plain",
        "unused-slots-are-seen",
        says="a single query attends to the zeros of the slab too",
        at=O_PROJ,
        cases=taps("llama"),
        plant=swap("engine.cache.plain:PlainCache.append", seen_slots(None)),
    ),
    fault(
        "padding",
        "plain",
        "one-unused-slot-is-seen",
        says="a single query attends to one slot that is not used yet",
        at=O_PROJ,
        cases=taps("qwen3"),
        plant=swap("engine.cache.plain:PlainCache.append", seen_slots(1)),
    ),
    fault(
        "padding",
        "packed",
        "unused-slots-are-seen",
        says="a single query attends to the unused slots of packed keys",
        at=O_PROJ,
        cases=taps("llama", kv="kv8-g64"),
        plant=swap("engine.cache.quantized:_first", lambda _: lambda heads, end: heads),  # noqa: ARG005
    ),
    fault(
        "padding",
        "packed",
        "values-unused-slot-is-seen",
        says="packed keys and values have one slot that is not used yet",
        at=O_PROJ,
        cases=taps("llama", kv="kv4-g32-s16"),
        plant=swap("engine.cache.quantized:_first", lambda right: lambda heads, end: right(heads, end + 1)),
    ),
    fault(
        "padding",
        "latent",
        "one-unused-slot-is-seen",
        says="a latent that is not there is attended to",
        at="model.layers.0.self_attn.o_proj",
        cases=taps("minicpm3"),
        plant=swap("engine.cache.plain:PlainCache.append", seen_slots(1)),
    ),
    *(
        fault(
            "padding",
            model,
            "convolution-repeats-the-first-position",
            says="before the first position the convolution sees it again, where zeros belong",
            at=at,
            cases=f"{model}-tiny/f32/fp/forced/p1-mutation-tail-split",
            plant=swap("engine.short_convolution:ShortConvolution.__call__", repeated_edge),
        )
        for model, at in (
            ("qwen3_5", "language_model.model.layers.0.linear_attn.conv1d"),
            ("mamba2", "backbone.layers.0.mixer.conv1d"),
        )
    ),
    fault(
        "padding",
        "packed",
        "scales-of-the-slot-before",
        says="packed scales come from the slot before, the first ones from a slot that is not used yet",
        at=O_PROJ,
        cases=taps("llama", kv="kv8-g64"),
        plant=swap(
            "engine.cache.quantized:_first",
            lambda right: (
                lambda heads, end: replace(
                    right(heads, end), scales=mx.roll(right(heads, end + 1).scales, 1, 2)[:, :, :end]
                )
            ),
        ),
    ),
)

FAULTS: Final[tuple[Fault, ...]] = (*MASK, *WINDOW, *PADDING)
