"""How a matrix of small floats (mxfp4, nvfp4, mxfp8) is laid out: blocks of columns, with scales for each dtype of activations.

Guarantees: those of `engine.kernels.layout`. Such a matrix says nothing about the dtype that it is multiplied in, and mlx
rounds its scales to that dtype; so they are kept as the bytes that they are and widened once for each dtype that comes.
"""

from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.kernels.blocks import address_of, blocks_of, on_a_line, rows_of
from engine.kernels.driver import SMALL_FLOATS, Form, shape_of
from engine.linear import Packed
from engine.quantization import Format

Floats = npt.NDArray[np.float32]
ONE: Final = {4: 0x22222222, 8: 0x38383838}  # a word of elements that are 1.0, by their width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallFloats:
    """Blocks of packed words [blocks, in * bits / 32, columns], with scales in float32 rounded to one dtype.

    Attributes:
        form: Of the product with activations of `dtype`.
        dtype: Of the activations.
        outputs: Rows of the matrix.
        columns: Of a block.
        format: As config.json says.
        words: uint32.
        scale_bytes: uint8 [blocks, in / group, columns].
        scales: float32, the same shape.
    """

    form: Form
    dtype: mx.Dtype
    outputs: int
    columns: int
    format: Format
    words: npt.NDArray[np.uint32]
    scale_bytes: npt.NDArray[np.uint8]
    scales: Floats
    shift: int = 0
    _others: dict[mx.Dtype, "SmallFloats"] = field(default_factory=dict)

    def at(self, dtype: mx.Dtype, name: str) -> "SmallFloats":
        """The same words for activations of another dtype, which forms call `name`."""
        if dtype == self.dtype:
            return self
        if dtype not in self._others:
            self._others[dtype] = SmallFloats(
                form=Form(stored=name, bits=self.form.bits, mode=self.form.mode),
                dtype=dtype,
                outputs=self.outputs,
                columns=self.columns,
                format=self.format,
                words=self.words,
                scale_bytes=self.scale_bytes,
                scales=_widened(self.scale_bytes, self.format, dtype),
            )
        return self._others[dtype]

    def addresses(self, block: int) -> tuple[int, int, int]:
        """Where the block's words and scales stand; there are no biases."""
        words, scales = (address_of(array) + block * array.strides[0] for array in (self.words, self.scales))
        return words, scales, 0

    @property
    def blocks(self) -> int:
        """How many there are."""
        return int(self.words.shape[0])

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.words.nbytes + self.scales.nbytes)

    def restored(self) -> Packed:
        """The matrix as the checkpoint has it."""
        return Packed(
            weight=mx.array(rows_of(self.words, self.outputs)),
            scales=mx.array(rows_of(self.scale_bytes, self.outputs)),
            biases=None,
            format=self.format,
        )


def is_small_floats(weight: Packed) -> bool:
    """Whether a packed matrix is of a format that has a compiled product."""
    form = weight.format
    known = SMALL_FLOATS.get(form.mode) == (form.bits, form.group_size)
    return (
        known and weight.biases is None and weight.scales.dtype == mx.uint8 and not weight.weight.shape[-1] % form.bits
    )


def lay_out_small_floats(weight: Packed) -> SmallFloats:
    """Lay out a matrix [out, in] for activations in float32; `at` gives the other dtypes."""
    form = Form(stored="f32", bits=weight.format.bits, mode=weight.format.mode)
    columns = shape_of(form).columns
    mx.eval(weight.weight, weight.scales)
    words, scale_bytes = (on_a_line(blocks_of(np.asarray(a), columns)) for a in (weight.weight, weight.scales))
    return SmallFloats(
        form=form,
        dtype=mx.float32,
        outputs=weight.weight.shape[0],
        columns=columns,
        format=weight.format,
        words=words,
        scale_bytes=scale_bytes,
        scales=_widened(scale_bytes, weight.format, mx.float32),
    )


def _widened(scale_bytes: npt.NDArray[np.uint8], form: Format, dtype: mx.Dtype) -> Floats:
    """Scales as mlx has them in a product with activations of `dtype`; a table, because there are 256."""
    words = mx.full((256, form.group_size * form.bits // 32), ONE[form.bits], dtype=mx.uint32)
    scales = mx.arange(256).astype(mx.uint8)[:, None]
    values = mx.dequantize(
        words, scales, group_size=form.group_size, bits=form.bits, mode=form.mode, dtype=dtype
    ).astype(mx.float32)
    return np.ascontiguousarray(np.array(values)[:, 0][scale_bytes])
