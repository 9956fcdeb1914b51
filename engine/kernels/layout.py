"""How a weight matrix is laid out for the compiled products: blocks of columns, all columns of a block at one k together.

Guarantees: the layout loses nothing and grows nothing but scales of 16 bits: `restored` gives every bit back. Dense float32
weights whose low halves are all zero (a bfloat16 checkpoint run in float32) are kept in two bytes: every element is looked
at, not a sample.
"""

from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.kernels.blocks import address_of, blocks_of, on_a_line, rows_of
from engine.kernels.driver import Form, converts, fuses, has_half_precision, shape_of
from engine.kernels.small_floats import SmallFloats, is_small_floats, lay_out_small_floats
from engine.kernels.tame import TAME, are_short, are_tame
from engine.linear import Packed
from engine.quantization import Format

Floats = npt.NDArray[np.float32]

NAMES: Final = {mx.float32: "f32", mx.bfloat16: "bf16", mx.float16: "f16"}
WIDTHS: Final = (2, 3, 4, 5, 6, 8)
GROUPS: Final = {32: 0, 64: 1, 128: 2}  # group size to the number of units in it, as a power of two


def supported(weight: object, *, ndim: int = 2) -> mx.array | Packed | None:
    """The weight of a layer where it has a compiled product: floats or packed words of `ndim` axes; else None."""
    if isinstance(weight, Packed):
        if is_small_floats(weight):
            return weight if weight.weight.ndim == ndim else None
        form, scales, biases = weight.format, weight.scales, weight.biases
        fits = form.mode == "affine" and form.bits in WIDTHS and form.group_size in GROUPS
        known = _converts(scales.dtype) and biases is not None and biases.dtype == scales.dtype
        return weight if fits and known and weight.weight.ndim == ndim else None
    if isinstance(weight, mx.array) and weight.ndim == ndim and _converts(weight.dtype) and 0 not in weight.shape:
        return weight
    return None


def _converts(dtype: mx.Dtype) -> bool:
    """Whether the CPU widens this dtype itself."""
    return dtype in NAMES and (dtype != mx.float16 or has_half_precision())


def lay_out(weight: mx.array | Packed) -> "Dense | Affine | SmallFloats":
    """Lay out a supported matrix [out, in]."""
    if not isinstance(weight, Packed):
        return _dense(weight)
    return lay_out_small_floats(weight) if is_small_floats(weight) else _affine(weight)


def laid_out_for(laid: "Dense | Affine | SmallFloats", dtype: mx.Dtype) -> "Dense | Affine | SmallFloats | None":
    """The layout for activations of a dtype; None where it has no product with them."""
    if isinstance(laid, SmallFloats) and _converts(dtype):
        return laid.at(dtype, NAMES[dtype])
    return laid if laid.dtype == dtype else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense:
    """Blocks [blocks, in, columns] of float32, or of 16-bit words."""

    form: Form
    dtype: mx.Dtype
    outputs: int
    columns: int
    words: npt.NDArray[Any]
    shift: int = 0

    def addresses(self, block: int) -> tuple[int, int, int]:
        """Where the block's weights, scales and biases stand; dense ones have no scales."""
        return address_of(self.words) + block * self.words.strides[0], 0, 0

    @property
    def blocks(self) -> int:
        """How many there are."""
        return int(self.words.shape[0])

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.words.nbytes)

    def restored(self) -> mx.array:
        """The matrix as the checkpoint has it."""
        words = _unpaired(self.words, self.columns) if self.form.stored == "bf16" else self.words
        rows = rows_of(words, self.outputs)
        if self.form.stored == "f32":
            return mx.array(rows)
        stored = mx.array(rows).view(mx.bfloat16 if self.form.stored == "bf16" else mx.float16)
        return stored.astype(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Affine:
    """Blocks of packed words [blocks, in * bits / 32, columns], scales and biases widened to float32."""

    form: Form
    dtype: mx.Dtype
    outputs: int
    columns: int
    format: Format
    words: npt.NDArray[np.uint32]
    scales: Floats
    biases: Floats
    shift: int

    def addresses(self, block: int) -> tuple[int, int, int]:
        """Where the block's weights, scales and biases stand."""
        words, scales, biases = (
            address_of(array) + block * array.strides[0] for array in (self.words, self.scales, self.biases)
        )
        return words, scales, biases

    @property
    def blocks(self) -> int:
        """How many there are."""
        return int(self.words.shape[0])

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.words.nbytes + self.scales.nbytes + self.biases.nbytes)

    def restored(self) -> Packed:
        """The matrix as the checkpoint has it."""
        return Packed(
            weight=mx.array(rows_of(self.words, self.outputs)),
            scales=mx.array(rows_of(self.scales, self.outputs)).astype(self.dtype),
            biases=mx.array(rows_of(self.biases, self.outputs)).astype(self.dtype),
            format=self.format,
        )


def _dense(weight: mx.array) -> Dense:
    stored = NAMES[weight.dtype]
    mx.eval(weight)
    values = np.asarray(weight if stored == "f32" else weight.view(mx.uint16))
    if stored == "f32" and not _has_low_halves(values):
        stored, values = "bf16", (values.view(np.uint32) >> 16).astype(np.uint16)
    form = Form(stored=stored)
    columns = shape_of(form).columns
    words = blocks_of(values, columns)
    words = _paired(words, columns) if stored == "bf16" else on_a_line(words)
    return Dense(
        form=form,
        dtype=weight.dtype,
        outputs=weight.shape[0],
        columns=columns,
        words=words,
    )


def _affine(weight: Packed) -> Affine:
    assert weight.biases is not None  # noqa: S101 - `supports` said so
    form = Form(stored=NAMES[weight.scales.dtype], bits=weight.format.bits)
    columns = shape_of(form).columns
    scales, biases = weight.scales.astype(mx.float32), weight.biases.astype(mx.float32)
    mx.eval(weight.weight, scales, biases)
    words, scale, bias = (on_a_line(blocks_of(np.asarray(a), columns)) for a in (weight.weight, scales, biases))
    tame = converts(form) and are_tame(scale) and are_tame(bias)
    if fuses(form):
        tame = are_short(scale, weight.format.bits)
    return Affine(
        form=form,
        dtype=weight.scales.dtype,
        outputs=weight.weight.shape[0],
        columns=columns,
        format=weight.format,
        words=words,
        scales=scale,
        biases=bias,
        shift=GROUPS[weight.format.group_size] | (TAME if tame else 0),
    )


def _has_low_halves(values: Floats) -> bool:
    """Whether any element has a bit that bfloat16 does not keep; most matrices of float32 say so in their first row."""
    words = values.view(np.uint32)
    return bool((words[0] & 0xFFFF).any()) or bool((words & 0xFFFF).any())


def _paired(blocks: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """The same lane of two neighbouring vectors side by side, so that one 32-bit word holds both."""
    lanes = columns // shape_of(Form(stored="bf16")).vectors
    count, inner, _ = blocks.shape
    pairs = blocks.reshape(count, inner, -1, 2, lanes).transpose(0, 1, 2, 4, 3)
    return on_a_line(pairs).reshape(blocks.shape)


def _unpaired(blocks: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """The inverse of `_paired`."""
    lanes = columns // shape_of(Form(stored="bf16")).vectors
    count, inner, _ = blocks.shape
    pairs = blocks.reshape(count, inner, -1, lanes, 2).transpose(0, 1, 2, 4, 3)
    return np.ascontiguousarray(pairs).reshape(blocks.shape)
