"""Faults of batches: padding that is seen, positions and rows that are mixed up.

A batch case records rows of logits and no modules, so none of these can be localised by its golden.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx

from engine.mask import causal_matrix
from parity.mutation.fault import Fault, fault
from parity.mutation.planting import swap

UNRECORDED: Final = "a batch case records no modules"
O_PROJ: Final = "model.layers.0.self_attn.o_proj"
LINEAR: Final = "language_model.model.layers.0.linear_attn.norm"
Method = Callable[..., Any]


def batch(model: str, plan: str, feed: str) -> str:
    """Name of a batch case of a tiny model in float32."""
    return f"{model}-tiny/f32/fp/forced/batch-{plan}-{feed}"


def padding_seen(_: Method) -> Method:
    """A mask that is causal and knows of no padding."""
    return lambda self, L, *, window: mx.broadcast_to(
        causal_matrix(L, before=self.used, window=window), (self.rows, 1, L, self.used + L)
    )


def one_column_seen(right: Method) -> Method:
    """A mask that hides one column of padding too few."""
    return lambda self, L, *, window: right(
        replace(self, padding=tuple(max(pad - 1, 0) for pad in self.padding)), L, window=window
    )


def ring_padding_seen(right: Method) -> Method:
    """A ring's mask that knows of no padding."""
    return lambda self, L, **options: right(replace(self, padding=(0,) * self.rows), L, **options)


def rolled_further(right: Method) -> Method:
    """Right padding that is rolled one column too far."""
    return lambda array, shifts: right(array, [shift + 1 for shift in shifts])


def rows_reversed(right: Method) -> Method:
    """Rows that stay are kept in the opposite order."""
    return lambda self, keep: right(self, tuple(keep)[::-1])


FAULTS: Final[tuple[Fault, ...]] = tuple(
    fault(kind, "batch", what, says=says, at=at, cases=cases, plant=plant, hidden=UNRECORDED)
    for kind, what, says, at, cases, plant in (
        (
            "padding",
            "seen",
            "queries of a batch see the padding at the left of their row",
            O_PROJ,
            batch("llama", "uneven-left", "whole"),
            swap("engine.cache.batch_columns:Columns.mask", padding_seen),
        ),
        (
            "padding",
            "one-column-seen",
            "queries of a batch see one column of padding",
            O_PROJ,
            batch("qwen3", "uneven-left", "whole"),
            swap("engine.cache.batch_columns:Columns.mask", one_column_seen),
        ),
        (
            "padding",
            "seen-in-a-ring",
            "queries of a batch see the padding that a ring holds",
            O_PROJ,
            (batch("llama_sliding", "short-left", "whole"), batch("llama_sliding", "uneven-left", "whole")),
            swap("engine.cache.batch_rotating:BatchRotatingCache.mask", ring_padding_seen),
        ),
        (
            "padding",
            "enters-the-state",
            "padding at the left enters the matrices of the delta rule",
            LINEAR,
            batch("qwen3_5", "uneven-left", "whole"),
            swap("engine.cache.recurrent:RecurrentCache.mask", lambda _: lambda self, L: None),  # noqa: ARG005
        ),
        (
            "padding",
            "enters-the-convolution",
            "padding at the right stays in the convolution's window",
            "model.layers.0.conv.conv",
            batch("lfm2", "uneven-right", "tail-split"),
            swap("engine.cache.recurrent:RecurrentCache.ends", lambda _: lambda self, L: None),  # noqa: ARG005
        ),
        (
            "padding",
            "not-rolled",
            "padding at the right is not rolled to the left",
            O_PROJ,
            batch("llama", "uneven-right", "tail-split"),
            swap("engine.cache.batch_plain:rolled", lambda _: lambda array, shifts: array),  # noqa: ARG005
        ),
        (
            "padding",
            "rolled-further",
            "padding at the right is rolled one column too far",
            O_PROJ,
            batch("qwen3", "uneven-right", "tail-split"),
            swap("engine.cache.batch_plain:rolled", rolled_further),
        ),
        (
            "cache offset",
            "columns-for-positions",
            "rows of a batch count their padding as positions",
            O_PROJ,
            batch("llama", "uneven-left", "whole"),
            swap(
                "engine.cache.batch_columns:Columns.row_offsets",
                lambda _: property(lambda self: (self.used,) * self.rows),
            ),
        ),
        (
            "trim",
            "rows-reversed",
            "rows that stay when others leave are kept in the opposite order",
            O_PROJ,
            batch("llama", "joining-right", "tail-split"),
            swap("engine.cache.batch_plain:BatchPlainCache.filter", rows_reversed),
        ),
    )
)
