"""A weight matrix laid out for the compiled products, and its product.

Guarantees: the layout loses nothing: the matrix is given back bit for bit wherever the compiled product does not fit, so
nothing is ever computed in another way than mlx would. The checkpoint's array is let go once it is laid out. Dense float32
weights whose low halves are all zero (a bfloat16 checkpoint run in float32) are kept in two bytes: every element is looked
at, not a sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.kernels.driver import NAN, ROWS_A_PIECE, Driver, Form, shape_of
from engine.kernels.team import Team
from engine.linear import Packed
from engine.quantization import Format

Floats = npt.NDArray[np.float32]

NAMES: Final = {mx.float32: "f32", mx.bfloat16: "bf16", mx.float16: "f16"}
WIDTHS: Final = (2, 3, 4, 5, 6, 8)
GROUPS: Final = {32: 0, 64: 1, 128: 2}  # group size to the number of units in it, as a power of two

_BYTES_A_THREAD: Final = 500_000  # weights that are worth waking a thread for
_STEPS_A_THREAD: Final = 1_500_000  # products that are


def supports(weight: object) -> bool:
    """Whether a weight, as a `Linear` holds it, has a compiled product: a matrix of floats, or affine-packed words."""
    if isinstance(weight, Packed):
        form = weight.format
        return (
            form.mode == "affine"
            and form.bits in WIDTHS
            and form.group_size in GROUPS
            and weight.weight.ndim == 2
            and weight.scales.dtype in NAMES
            and weight.biases is not None
            and weight.biases.dtype == weight.scales.dtype
        )
    return isinstance(weight, mx.array) and weight.ndim == 2 and weight.dtype in NAMES and 0 not in weight.shape


@dataclass(slots=True, kw_only=True, eq=False)
class FastMatrix:
    """A matrix [out, in] with a compiled product; laid out when it is first used.

    Attributes:
        driver: The compiled product of a form.
        team: Threads.
        plain: The matrix as the checkpoint has it; None once it is laid out.
    """

    driver: Callable[[Form], Driver]
    team: Team
    plain: mx.array | Packed | None
    _laid: "_Dense | _Affine | None" = None

    def product(self, x: mx.array, bias: mx.array | None = None) -> mx.array:
        """x @ W.T + bias for x [..., in]; result [..., out].

        Numerics: those of mlx: dense, the float32 sum gets the bias in float32 and is rounded once; packed, the bias is added
            to the rounded product.
        Source: spec/cpu.md section 1.
        """
        if self._laid is None:
            self._lay_out()
        laid = self._laid
        if laid is None or x.dtype != laid.dtype or x.size == 0 or (bias is not None and bias.dtype != x.dtype):
            return plain_product(x, self.restored(), bias)
        total = self._sums(laid, x)
        if total is None:
            return plain_product(x, self.restored(), bias)
        if bias is None:
            return total.astype(x.dtype)
        if isinstance(laid, _Affine):
            return total.astype(x.dtype) + bias
        return (total + bias.astype(mx.float32)).astype(x.dtype)

    def restored(self) -> mx.array | Packed:
        """The matrix as the checkpoint has it."""
        if self.plain is not None:
            return self.plain
        assert self._laid is not None  # noqa: S101 - one of the two is always there
        return self._laid.restored()

    def _lay_out(self) -> None:
        assert self.plain is not None  # noqa: S101 - one of the two is always there
        self._laid = _affine(self.plain) if isinstance(self.plain, Packed) else _dense(self.plain)
        self.plain = None

    def _sums(self, laid: "_Dense | _Affine", x: mx.array) -> mx.array | None:
        """float32 [..., out]; None where one is NaN."""
        wide = x if x.dtype == mx.float32 else x.astype(mx.float32)
        mx.eval(wide)
        rows = prod(x.shape[:-1])
        values = np.ascontiguousarray(np.asarray(wide)).reshape(rows, x.shape[-1])
        y = run(self.driver(laid.form), self.team, laid, values)
        if y is None:
            return None
        return mx.array(y if y.shape[1] == laid.outputs else np.ascontiguousarray(y[:, : laid.outputs])).reshape(
            *x.shape[:-1], laid.outputs
        )


def plain_product(x: mx.array, weight: mx.array | Packed, bias: mx.array | None) -> mx.array:
    """x @ W.T + bias by mlx: what the compiled products are held to."""
    if isinstance(weight, Packed):
        return weight.product(x) if bias is None else weight.product(x) + bias
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def run(driver: Driver, team: Team, laid: "_Dense | _Affine", x: Floats) -> Floats | None:
    """The sums of x [rows, in] with a laid-out matrix, [rows, out], `out` up to a whole block; None where one is NaN."""
    rows, inner = x.shape
    blocks, width = laid.blocks, laid.blocks * laid.columns
    y = np.empty((rows, width), np.float32)
    addresses = address_of(x), address_of(y)

    def work(control: int) -> int:
        into = addresses[1]
        return driver(addresses[0], rows, inner, *laid.addresses, laid.shift, into, width, blocks, control)

    pieces = blocks * -(-rows // ROWS_A_PIECE)
    worth = max(laid.size // _BYTES_A_THREAD, rows * inner * width // _STEPS_A_THREAD)
    control = team.run(work, pieces, threads=max(1, worth))
    return None if control[NAN] else y


def address_of(array: "np.ndarray[Any, Any]") -> int:
    """Where the data of a contiguous array stands."""
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dense:
    """Blocks [blocks, in, columns] of float32, or of 16-bit words."""

    form: Form
    dtype: mx.Dtype
    outputs: int
    columns: int
    words: npt.NDArray[Any]
    addresses: tuple[int, int, int]
    shift: int = 0

    @property
    def blocks(self) -> int:
        return int(self.words.shape[0])

    @property
    def size(self) -> int:
        return int(self.words.nbytes)

    def restored(self) -> mx.array:
        words = _unpaired(self.words, self.columns) if self.form.stored == "bf16" else self.words
        rows = _rows(words, self.outputs)
        if self.form.stored == "f32":
            return mx.array(rows)
        stored = mx.array(rows).view(mx.bfloat16 if self.form.stored == "bf16" else mx.float16)
        return stored.astype(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Affine:
    """Blocks of packed words [blocks, in * bits / 32, columns], scales and biases widened to float32."""

    form: Form
    dtype: mx.Dtype
    outputs: int
    columns: int
    format: Format
    words: npt.NDArray[np.uint32]
    scales: Floats
    biases: Floats
    addresses: tuple[int, int, int]
    shift: int

    @property
    def blocks(self) -> int:
        return int(self.words.shape[0])

    @property
    def size(self) -> int:
        return int(self.words.nbytes + self.scales.nbytes + self.biases.nbytes)

    def restored(self) -> Packed:
        return Packed(
            weight=mx.array(_rows(self.words, self.outputs)),
            scales=mx.array(_rows(self.scales, self.outputs)).astype(self.dtype),
            biases=mx.array(_rows(self.biases, self.outputs)).astype(self.dtype),
            format=self.format,
        )


def _dense(weight: mx.array) -> _Dense:
    stored = NAMES[weight.dtype]
    mx.eval(weight)
    values = np.asarray(weight if stored == "f32" else weight.view(mx.uint16))
    if stored == "f32" and not _has_low_halves(values):
        stored, values = "bf16", (values.view(np.uint32) >> 16).astype(np.uint16)
    form = Form(stored=stored)
    columns = shape_of(form).columns
    words = _blocks(values, columns)
    if stored == "bf16":
        words = _paired(words, columns)
    return _Dense(
        form=form,
        dtype=weight.dtype,
        outputs=weight.shape[0],
        columns=columns,
        words=words,
        addresses=(address_of(words), 0, 0),
    )


def _affine(weight: Packed) -> _Affine:
    assert weight.biases is not None  # noqa: S101 - `supports` said so
    form = Form(stored=NAMES[weight.scales.dtype], bits=weight.format.bits)
    columns = shape_of(form).columns
    scales, biases = weight.scales.astype(mx.float32), weight.biases.astype(mx.float32)
    mx.eval(weight.weight, scales, biases)
    words, scale, bias = (_blocks(np.asarray(a), columns) for a in (weight.weight, scales, biases))
    return _Affine(
        form=form,
        dtype=weight.scales.dtype,
        outputs=weight.weight.shape[0],
        columns=columns,
        format=weight.format,
        words=words,
        scales=scale,
        biases=bias,
        addresses=(address_of(words), address_of(scale), address_of(bias)),
        shift=GROUPS[weight.format.group_size],
    )


def _has_low_halves(values: Floats) -> bool:
    """Whether any element has a bit that bfloat16 does not keep; most matrices of float32 say so in their first row."""
    words = values.view(np.uint32)
    return bool((words[0] & 0xFFFF).any()) or bool((words & 0xFFFF).any())


def _blocks(rows: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """[out, in] as [blocks, in, columns], zeros where the last block has no output."""
    outputs, inner = rows.shape
    if missing := -outputs % columns:
        rows = np.concatenate([rows, np.zeros((missing, inner), rows.dtype)])
    return np.ascontiguousarray(rows.reshape(-1, columns, inner).transpose(0, 2, 1))


def _rows(blocks: npt.NDArray[Any], outputs: int) -> npt.NDArray[Any]:
    """The inverse of `_blocks`."""
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1, blocks.shape[1])[:outputs]


def _paired(blocks: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """The same lane of two neighbouring vectors side by side, so that one 32-bit word holds both."""
    lanes = columns // shape_of(Form(stored="bf16")).vectors
    count, inner, _ = blocks.shape
    pairs = blocks.reshape(count, inner, -1, 2, lanes).transpose(0, 1, 2, 4, 3)
    return np.ascontiguousarray(pairs).reshape(blocks.shape)


def _unpaired(blocks: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """The inverse of `_paired`."""
    lanes = columns // shape_of(Form(stored="bf16")).vectors
    count, inner, _ = blocks.shape
    pairs = blocks.reshape(count, inner, -1, lanes, 2).transpose(0, 1, 2, 4, 3)
    return np.ascontiguousarray(pairs).reshape(blocks.shape)
