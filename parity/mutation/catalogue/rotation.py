"""Faults of rotary positions: base, offset and pairing.

The rotation has no module path of its own; what it does wrong is first seen where attention's output is projected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.rope import Rope
from parity.mutation.changes import exchanged, fields, plus, times, to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """A rotation that is told a wrong position.

    Attributes:
        rope: The right one.
        position: From the right position to the wrong one.
        heads: Rotate so only what has this many heads; None for all.
    """

    rope: Rope
    position: Callable[[int], int]
    heads: int | None = None

    @property
    def width(self) -> int:
        """Elements rotated."""
        return self.rope.width

    def __call__(self, x_BHLE: mx.array, offset: int) -> mx.array:
        """Rotate at the wrong position."""
        wrong = self.heads is None or x_BHLE.shape[1] == self.heads
        return self.rope(x_BHLE, self.position(offset) if wrong else offset)


def misplaced(position: Callable[[int], int], heads: int | None = None) -> Callable[[Rope], Misplaced]:
    """From a rotation to a misplaced one."""
    return lambda rope: Misplaced(rope=rope, position=position, heads=heads)


def seen(layer: int, *, out: str = "self_attn.o_proj", body: str = "model") -> str:
    """Where a rotation's fault is first seen."""
    return f"{body}.layers.{layer}.{out}"


NEAR: Final = fields(base=times(1.0001))
QWEN3_5: Final = "language_model.model"

BASE: Final = tuple(
    fault(
        "rope base",
        model,
        f"layer-{layer}-a-ten-thousandth-off",
        says=f"the base of layer {layer}'s rotation is 0.01 % too large",
        at=seen(layer, out=out, body=body),
        cases=taps(model),
        plant=edit(f"blocks.{layer}.{part}.rope", NEAR),
    )
    for model, layer, part, out, body in (
        ("llama_default", 0, "attention", "self_attn.o_proj", "model"),
        ("llama_default", 3, "attention", "self_attn.o_proj", "model"),
        ("qwen2", 1, "attention", "self_attn.o_proj", "model"),
        ("qwen3", 2, "attention", "self_attn.o_proj", "model"),
        ("qwen3_moe", 0, "attention", "self_attn.o_proj", "model"),
        ("mixtral", 3, "attention", "self_attn.o_proj", "model"),
        ("starcoder2", 1, "attention", "self_attn.o_proj", "model"),
        ("granite", 2, "attention", "self_attn.o_proj", "model"),
        ("glm4_moe", 1, "attention", "self_attn.o_proj", "model"),
        ("gemma2", 0, "attention", "self_attn.o_proj", "model"),
        ("cohere2", 1, "attention", "self_attn.o_proj", "model"),
        ("falcon_h1", 2, "attention", "self_attn.o_proj", "model"),
        ("lfm2", 1, "operator", "self_attn.out_proj", "model"),
        ("qwen3_5", 3, "attention", "self_attn.o_proj", QWEN3_5),
    )
)

OFFSET: Final = (
    *(
        fault(
            "rope offset",
            model,
            f"layer-{layer}-one-late",
            says=f"layer {layer} rotates queries and keys one position too far",
            at=seen(layer, out=out, body=body),
            cases=taps(model),
            plant=edit(f"blocks.{layer}.{part}.rope", misplaced(plus(1))),
        )
        for model, layer, part, out, body in (
            ("llama", 0, "attention", "self_attn.o_proj", "model"),
            ("phi3", 2, "attention", "self_attn.o_proj", "model"),
            ("qwen3_5", 3, "attention", "self_attn.o_proj", QWEN3_5),
            ("lfm2", 3, "operator", "self_attn.out_proj", "model"),
        )
    ),
    *(
        fault(
            "rope offset",
            model,
            f"layer-{layer}-queries-only",
            says=f"layer {layer} rotates queries, and not keys, one position too far",
            at=seen(layer),
            cases=taps(model),
            plant=edit(f"blocks.{layer}.attention.rope", misplaced(plus(1), heads=4)),
        )
        for model, layer in (("qwen3", 1), ("gemma3_text", 2), ("glm4_moe", 0))
    ),
    *(
        fault(
            "rope offset",
            model,
            f"layer-{layer}-counts-the-piece",
            says=f"layer {layer} counts positions from the beginning of the piece that it is fed",
            at=seen(layer),
            cases=taps(model),
            plant=edit(f"blocks.{layer}.attention.rope", misplaced(lambda _: 0)),
        )
        for model, layer in (("qwen2", 0), ("cohere2", 2), ("falcon_h1", 1), ("gpt_oss", 1))
    ),
    fault(
        "rope offset",
        "deepseek_v3",
        "layer-1-one-late",
        says="layer 1 rotates the shared part of queries and keys one position too far",
        at="model.layers.1.self_attn.unembed_out",
        cases=taps("deepseek_v3"),
        plant=edit("blocks.1.attention.rope", misplaced(plus(1))),
    ),
)

PAIRING: Final = (
    *(
        fault(
            "rope pairing",
            model,
            f"layer-{layer}-{'halves' if traditional else 'neighbours'}",
            says=f"layer {layer} pairs {'halves' if traditional else 'neighbours'} of a head",
            at=seen(layer, out=out, body=body),
            cases=taps(model),
            plant=edit(f"blocks.{layer}.{part}.rope", fields(traditional=to(not traditional))),
        )
        for model, layer, part, traditional, out, body in (
            ("llama", 0, "attention", False, "self_attn.o_proj", "model"),
            ("qwen2", 2, "attention", False, "self_attn.o_proj", "model"),
            ("falcon_h1", 0, "attention", False, "self_attn.o_proj", "model"),
            ("gemma", 1, "attention", False, "self_attn.o_proj", "model"),
            ("cohere2", 0, "attention", True, "self_attn.o_proj", "model"),
            ("deepseek_v3", 2, "attention", True, "self_attn.unembed_out", "model"),
            ("qwen3_5", 3, "attention", False, "self_attn.o_proj", QWEN3_5),
        )
    ),
    fault(
        "rope pairing",
        "glm4_moe",
        "whole-head",
        says="the whole head turns where half of it does",
        at=seen(0),
        cases=taps("glm4_moe"),
        plant=edit("blocks.0.attention.rope", fields(width=times(2))),
    ),
    fault(
        "rope pairing",
        "qwen3_5",
        "half-of-the-part",
        says="half of the elements that turn do",
        at=seen(3, body=QWEN3_5),
        cases=taps("qwen3_5"),
        plant=edit("blocks.3.attention.rope", fields(width=lambda width: width // 2)),
    ),
    fault(
        "rope pairing",
        "phi3",
        "two-pairs-exchanged",
        says="two pairs have each other's period",
        at=seen(0),
        cases=taps("phi3"),
        plant=edit("blocks.0.attention.rope", fields(periods=exchanged(0, 5))),
    ),
)

FAULTS: Final[tuple[Fault, ...]] = (*BASE, *OFFSET, *PAIRING)
