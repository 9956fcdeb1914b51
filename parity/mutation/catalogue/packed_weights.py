"""Faults of packed weights: groups, bits and zeros that are read wrongly."""

from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.quantization import Format
from parity.mutation.changes import Change, exchanged, rolled, times
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit

Q4, Q8, MIXED, MXFP4, NVFP4 = (taps(f"llama-{name}") for name in ("q4g32", "q8g64", "mixed", "mxfp4", "nvfp4"))
Q_PROJ: Final = "model.layers.0.self_attn.q_proj"


def nibbles_exchanged(words: mx.array) -> mx.array:
    """Two neighbouring elements of four bits in each other's place."""
    low = mx.array(0x0F0F0F0F, mx.uint32)
    return mx.left_shift(words & low, mx.array(4, mx.uint32)) | (mx.right_shift(words, mx.array(4, mx.uint32)) & low)


def masked(mask: int) -> Change:
    """Words less some bits."""
    return lambda words: words & mx.array(mask, mx.uint32)


def wider_groups(packed: Any) -> Any:  # noqa: ANN401 - engine.linear.Packed
    """Every second group is read with the scale and bias of the one before it."""
    return replace(
        packed,
        scales=packed.scales[..., ::2],
        biases=packed.biases[..., ::2],
        format=Format(bits=packed.format.bits, group_size=2 * packed.format.group_size),
    )


def narrower_bits(packed: Any) -> Any:  # noqa: ANN401 - engine.linear.Packed
    """A module of four bits whose elements lose their lowest one."""
    return replace(packed, weight=masked(0xEEEEEEEE)(packed.weight))


def one_ulp_everywhere(array: mx.array) -> mx.array:
    """Every element's stored word plus one."""
    size = {2: (mx.uint16, np.uint16), 4: (mx.uint32, np.uint32)}[array.dtype.size]
    return mx.array(np.array(array.view(size[0])) + size[1](1)).view(array.dtype)


FAULTS: Final[tuple[Fault, ...]] = tuple(
    fault(kind, part, what, says=says, at=at, cases=cases, plant=edit(path, change))
    for kind, part, what, says, at, cases, path, change in (
        (
            "quantisation group",
            "q4g32",
            "twice-as-wide",
            "groups of 32 are read as groups of 64",
            Q_PROJ,
            Q4,
            "blocks.0.attention.q.weight",
            wider_groups,
        ),
        (
            "quantisation group",
            "q4g32",
            "scales-one-group-late",
            "groups of layer 1's down projection have the scale before",
            "model.layers.1.mlp.down_proj",
            Q4,
            "blocks.1.mlp.down.weight.scales",
            rolled(1, axis=1),
        ),
        (
            "quantisation group",
            "q8g64",
            "groups-exchanged",
            "groups have each other's scales",
            "model.layers.2.self_attn.k_proj",
            Q8,
            "blocks.2.attention.k.weight.scales",
            exchanged(0, 1, axis=1),
        ),
        (
            "quantisation group",
            "q4g32",
            "rows-one-off",
            "rows of the embedding have the scales of the next",
            "model.embed_tokens",
            Q4,
            "embedding.weight.scales",
            rolled(1),
        ),
        (
            "quantisation group",
            "mxfp4",
            "scales-one-group-late",
            "groups have the scale before theirs",
            "model.layers.0.mlp.gate_proj",
            MXFP4,
            "blocks.0.mlp.gate.weight.scales",
            rolled(1, axis=1),
        ),
        (
            "quantisation bits",
            "q4g32",
            "nibbles-exchanged",
            "elements of four bits are unpacked in the wrong order",
            Q_PROJ,
            Q4,
            "blocks.0.attention.q.weight.weight",
            nibbles_exchanged,
        ),
        (
            "quantisation bits",
            "q4g32",
            "three-of-four",
            "the lowest of four bits is lost",
            "model.layers.3.self_attn.v_proj",
            Q4,
            "blocks.3.attention.v.weight",
            narrower_bits,
        ),
        (
            "quantisation bits",
            "q8g64",
            "highest-lost",
            "the highest of eight bits is lost",
            "model.layers.1.mlp.up_proj",
            Q8,
            "blocks.1.mlp.up.weight.weight",
            masked(0x7F7F7F7F),
        ),
        (
            "quantisation bits",
            "mixed",
            "lowest-lost",
            "a module of a mixed snapshot loses its lowest bits",
            "model.layers.0.self_attn.o_proj",
            MIXED,
            "blocks.0.attention.o.weight.weight",
            masked(0xEEEEEEEE),
        ),
        (
            "quantisation bits",
            "mxfp4",
            "signs-lost",
            "small floats lose their sign",
            "model.layers.2.mlp.up_proj",
            MXFP4,
            "blocks.2.mlp.up.weight.weight",
            masked(0x77777777),
        ),
        (
            "quantisation bits",
            "nvfp4",
            "nibbles-exchanged",
            "small floats are unpacked in the wrong order",
            Q_PROJ,
            NVFP4,
            "blocks.0.attention.q.weight.weight",
            nibbles_exchanged,
        ),
        (
            "quantisation zero",
            "q4g32",
            "lost",
            "elements are multiplied, and no bias is added",
            Q_PROJ,
            Q4,
            "blocks.0.attention.q.weight.biases",
            times(0.0),
        ),
        (
            "quantisation zero",
            "q4g32",
            "subtracted",
            "the bias is subtracted",
            "model.layers.2.mlp.gate_proj",
            Q4,
            "blocks.2.mlp.gate.weight.biases",
            times(-1.0),
        ),
        (
            "quantisation zero",
            "q8g64",
            "one-ulp",
            "biases of the head are one ULP off in its first element",
            "lm_head",
            Q8,
            "head.weight.biases",
            one_ulp_everywhere,
        ),
        (
            "quantisation zero",
            "mxfp4",
            "exponent-one-off",
            "the exponent of a group's scale is one too large",
            "model.layers.1.self_attn.q_proj",
            MXFP4,
            "blocks.1.attention.q.weight.scales",
            lambda scales: scales + mx.array(1, mx.uint8),
        ),
        (
            "quantisation zero",
            "nvfp4",
            "scale-one-off",
            "the word of a group's scale is one too large",
            "model.layers.3.mlp.down_proj",
            NVFP4,
            "blocks.3.mlp.down.weight.scales",
            lambda scales: scales + mx.array(1, mx.uint8),
        ),
        (
            "quantisation zero",
            "experts",
            "lost",
            "packed experts are multiplied, and no bias is added",
            "model.layers.2.mlp.switch_mlp",
            taps("qwen3_moe-q4g64"),
            "blocks.2.mlp.experts.down.weight.biases",
            times(0.0),
        ),
    )
)
