"""The words of each part of a step, from what they mean: which fields of `engine.kernels.fields` a part has.

Guarantees: everything that a part reads is given by its arguments; what is not given is zero, which each field takes for none.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where some outputs of a product stand.

    Attributes:
        buffer: Word of the context.
        width: Floats of a row.
        at: Floats before them in it.
        bias: Address of theirs, 0 for none.
    """

    buffer: int
    width: int
    at: int = 0
    bias: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWords:
    """A norm as a part has it.

    Attributes:
        weight: Address, 0 where there is no norm.
        eps: Beside the mean square, or the variance.
        kind: `RMS`, `CENTRED` or `NO_NORM` of `engine.kernels.fields`.
        shift: Address of what is added at last, 0 for none.
    """

    weight: int = 0
    eps: float = 0.0
    kind: int = f.RMS
    shift: int = 0


NOTHING = NormWords(kind=f.NO_NORM)


def norm_part(
    code: StepCode,
    *,
    width: int,
    norm: NormWords,
    added: Place | None = None,
    post: NormWords = NOTHING,
    multiplier: float | None = None,
    also: Place | None = None,
) -> dict[int, int]:
    """The words of a norm of the stream, to which something may be added before.

    Args:
        code: Compiled parts.
        width: Elements of a row.
        norm: Of the stream.
        added: What is added to it, unrounded, or None.
        post: Norm of what is added.
        multiplier: Of what is added, rounded as the activations are.
        also: What is added to that before, unrounded.
    """
    words = {
        f.KIND: f.OTHER,
        f.CODE: entry(code.norm),
        f.SYNC: 1,
        f.Y: f.NORMED,
        f.N_INNER: width,
        f.N_WEIGHT: norm.weight,
        f.N_EPS: low(norm.eps),
        f.N_INVERSE: low(1.0 / width),
        f.N_KIND: norm.kind,
        f.N_SHIFT: norm.shift,
    }
    if added is None:
        return words
    words |= {f.X: added.buffer, f.X_WIDTH: added.width, f.BIAS: added.bias, f.POST: post.weight}
    words |= {f.POST_EPS: low(post.eps)}
    if multiplier is not None:
        words |= {f.HAS_MULTIPLIER: 1, f.MULTIPLIER: low(multiplier)}
    if also is not None:
        words |= {f.ALSO: also.buffer, f.ALSO_WIDTH: also.width, f.ALSO_BIAS: also.bias}
    return words


def row_norm_part(code: StepCode, place: Place, *, width: int, norm: NormWords, sync: bool) -> dict[int, int]:
    """The words of a norm of whole rows in place."""
    return {
        f.KIND: f.OTHER,
        f.CODE: entry(code.row_norm),
        f.SYNC: int(sync),
        f.X: place.buffer,
        f.X_WIDTH: place.width,
        f.BIAS: place.bias,
        f.N_INNER: width,
        f.N_WEIGHT: norm.weight,
        f.N_EPS: low(norm.eps),
        f.N_INVERSE: low(1.0 / width),
    }


def rotation_part(
    code: StepCode,
    geometry: Geometry,
    *,
    layer: int,
    group: int,
    places: tuple[Place, Place, Place],
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
        places: Of queries, of keys and of values; queries come first in their row.
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
        **dict(zip((f.Q_FROM, f.K_FROM, f.V_FROM), (place.buffer for place in places), strict=True)),
        **dict(zip((f.Q_WIDTH, f.K_WIDTH, f.V_WIDTH), (place.width for place in places), strict=True)),
        **dict(zip((f.Q_BIAS, f.K_BIAS, f.V_BIAS), (place.bias for place in places), strict=True)),
        f.K_AT: places[1].at,
        f.V_AT: places[2].at,
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


def attention_part(
    code: StepCode,
    geometry: Geometry,
    *,
    layer: int,
    group: int,
    window: int | None,
    ring: bool = True,
    cap: float | None = None,
) -> dict[int, int]:
    """The words of attention; a layer with a window has the ring of its own number, where it has one."""
    run = code.packed_attention[STORED.index(NAMES[geometry.dtype])] if geometry.bits else code.attention
    words = _heads(geometry, layer, group) | {f.CODE: entry(run), f.RING: -1}
    if window is not None:
        words |= {f.WINDOW: window, f.RING: layer if ring else -1}
    return words if cap is None else words | {f.CAP: low(stored(cap, geometry.dtype))}


def gate_part(
    code: StepCode, *, inner: int, gate: Place, up: Place | None, activation: int, chosen: int = 1
) -> dict[int, int]:
    """The words of an activation: of gate and up, or of one alone; the gate comes first in its row.

    There are `chosen` rows for each of the call's.
    """
    words = {
        f.KIND: f.OTHER,
        f.CODE: entry(code.gate),
        f.SYNC: 1,
        f.A_INNER: inner,
        f.GATE_WIDTH: gate.width,
        f.GATE_BIAS: gate.bias,
        f.ACTIVATION: activation,
        f.A_CHOSEN: chosen,
    }
    if up is None:
        return words
    return words | {f.UP_FROM: up.buffer, f.UP_WIDTH: up.width, f.UP_AT: up.at, f.UP_BIAS: up.bias}


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
