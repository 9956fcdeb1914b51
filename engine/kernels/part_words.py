"""The words of each part of a step, from what they mean: which fields of `engine.kernels.fields` a part has.

Guarantees: everything that a part reads is given by its arguments; what is not given is zero, which each field takes for none.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.kernels import fields as f
from engine.kernels.history import Floats, Geometry, aligned
from engine.kernels.layout import NAMES
from engine.kernels.memory import entry
from engine.kernels.step import StepCode
from engine.kernels.tile import STORED
from engine.rope import Rope

Words = npt.NDArray[np.int64]


def norm_part(
    code: StepCode,
    *,
    width: int,
    weight: int,
    eps: float,
    sums: int = 0,
    bias: int = 0,
    post: int = 0,
    post_eps: float = 0.0,
) -> dict[int, int]:
    """The words of a norm; `sums` is the width of a row of SUMS, 0 where nothing is added before."""
    words = {
        f.KIND: f.OTHER,
        f.CODE: entry(code.norm),
        f.SYNC: 1,
        f.Y: f.NORMED,
        f.N_INNER: width,
        f.N_WEIGHT: weight,
        f.N_EPS: low(eps),
        f.N_INVERSE: low(1.0 / width),
    }
    added = {f.X: f.SUMS, f.X_WIDTH: sums, f.BIAS: bias, f.POST: post, f.POST_EPS: low(post_eps)}
    return words | added if sums else words


def rotation_part(
    code: StepCode,
    geometry: Geometry,
    *,
    layer: int,
    group: int,
    widths: tuple[int, ...],
    biases: tuple[int, ...],
    norms: tuple[int, ...],
    eps: float,
    rope: Rope | None,
    table: int,
    scale: float,
) -> dict[int, int]:
    """The words of rotating and storing.

    Args:
        code: Compiled parts.
        geometry: Of slabs.
        layer: Whose keys and values.
        group: Heads of queries for one of keys.
        widths: Floats of a row of queries, of keys and of values.
        biases: Their addresses.
        norms: Addresses of the weights for queries and for keys.
        eps: Of both norms.
        rope: Rotation, or None.
        table: Which one of the context's it has.
        scale: Factor on the scores.
    """
    words = _heads(geometry, layer, group) | {
        f.CODE: entry(code.rotation),
        f.H_EPS: low(eps),
        f.H_INVERSE: low(1.0 / geometry.width),
        f.SCALE: low(stored(scale, geometry.dtype)),
        **dict(zip((f.Q_WIDTH, f.K_WIDTH, f.V_WIDTH), widths, strict=True)),
        **dict(zip((f.Q_BIAS, f.K_BIAS, f.V_BIAS), biases, strict=True)),
        **dict(zip((f.Q_NORM, f.K_NORM), norms, strict=True)),
    }
    if rope is None:
        return words
    return words | {
        f.TABLE: f.TABLES + 2 * table,
        f.TURNING: rope.width,
        f.NEIGHBOURS: int(rope.traditional),
        f.HAS_GAIN: int(rope.gain != 1.0),
        f.GAIN: low(stored(rope.gain, geometry.dtype)),
    }


def packing_part(code: StepCode, geometry: Geometry, *, layer: int) -> dict[int, int]:
    """The words of packing what a rotation stored, in slabs that have room for codes."""
    return _heads(geometry, layer, 1) | {
        f.CODE: entry(code.packing),
        f.ELEMENTS: geometry.group_size,
        f.TOP: low((1 << geometry.bits) - 1),
        f.SCALES_AT: geometry.scales_at * 4,
        f.CODES_AT: geometry.codes_at * 4,
    }


def attention_part(code: StepCode, geometry: Geometry, *, layer: int, group: int, window: int | None) -> dict[int, int]:
    """The words of attention; a layer with a window has the ring of its own number."""
    run = code.packed_attention[STORED.index(NAMES[geometry.dtype])] if geometry.bits else code.attention
    ring = {f.RING: -1} if window is None else {f.RING: layer, f.WINDOW: window}
    return _heads(geometry, layer, group) | ring | {f.CODE: entry(run)}


def gate_part(
    code: StepCode, *, inner: int, widths: tuple[int, int], biases: tuple[int, int], activation: int
) -> dict[int, int]:
    """The words of a gated activation: widths of the rows of gate and up, and their biases."""
    return {
        f.KIND: f.OTHER,
        f.CODE: entry(code.gate),
        f.SYNC: 1,
        f.A_INNER: inner,
        f.GATE_WIDTH: widths[0],
        f.UP_WIDTH: widths[1],
        f.GATE_BIAS: biases[0],
        f.UP_BIAS: biases[1],
        f.ACTIVATION: activation,
    }


def _heads(geometry: Geometry, layer: int, group: int) -> dict[int, int]:
    return {
        f.KIND: f.OTHER,
        f.SYNC: 1,
        f.GROUPS: geometry.groups,
        f.GROUP: group,
        f.HEAD: geometry.width,
        f.HEAD_BLOCKS: geometry.blocks,
        f.COLUMNS: geometry.columns,
        f.LAYER: layer,
        f.VALUES_AT: geometry.key_floats * 4,
    }


def words_of(part: dict[int, Any]) -> Words:
    """The fields of a part."""
    row = np.zeros(f.FIELDS, np.int64)
    for index, value in part.items():
        row[index] = int(value)
    return row


def floats(array: mx.array) -> Floats:
    """A float32 copy, on a line of its own."""
    values = np.array(array.astype(mx.float32))
    copy = aligned(values.size)
    copy[:] = values.reshape(-1)
    return copy


def stored(value: float, dtype: mx.Dtype) -> float:
    """A number as mlx takes it beside arrays of a dtype."""
    return float(np.array(mx.array(value, dtype=dtype).astype(mx.float32)))


def low(value: float) -> int:
    """A float32 in the low half of a word."""
    return int(np.float32(value).view(np.uint32))
