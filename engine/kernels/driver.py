# ruff: noqa: ANN001, ANN202, ARG001, PLR0917 - Numba reads these signatures; what is compiled takes integers only
# mypy: disable-error-code="attr-defined,call-arg,var-annotated,unreachable,import-untyped"
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
"""Compiled products: blocks of columns and runs of rows, handed out one by one to whoever comes for work.

Guarantees: any number of threads may run the same call at once; every piece of work is done by exactly one of them, and a
thread that comes late finds none and touches nothing. Compiled code is kept on disk in the folder given, under a digest of
these sources, so that code of other sources is never run.

Numerics: those of `engine.kernels.tile`. Which thread computes a piece does not change it.
"""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import llvmlite.binding as llvm
import numba
from numba import njit, types

from engine.kernels import contraction
from engine.kernels.float_tile import float_tile
from engine.kernels.memory import take
from engine.kernels.symbols import named
from engine.kernels.tame import TAME, is_tame
from engine.kernels.tile import ROUNDINGS, STORED, dense_tile, packed_tile
from engine.kernels.vector_code import CONVERTED, FUSED, Shape

Driver = Callable[..., int]

SMALL_FLOATS: Final = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # mode to bits and elements a scale
ROWS_A_PIECE: Final = 48  # rows that a thread takes at once: a multiple of every tile's rows
NEXT, DONE, NAN, SLOTS = (
    0,
    8,
    16,
    24,
)  # where the control words stand, 64 bytes apart: int64 [SLOTS], zero before a call


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One kind of weights against one kind of activations.

    Attributes:
        stored: How dense weights are kept (`f32`, `bf16`, `f16`); for packed ones the dtype that every operation rounds to.
        bits: Width of packed weights; None where dense.
        mode: Of packed weights: `affine`, or a format of small floats (`SMALL_FLOATS`).
    """

    stored: str
    bits: int | None = None
    mode: str = "affine"

    @property
    def name(self) -> str:
        """Such as `dense-bf16`, `packed-4-f32` or `mxfp4-bf16`."""
        if self.mode != "affine":
            return f"{self.mode}-{self.stored}"
        return f"dense-{self.stored}" if self.bits is None else f"packed-{self.bits}-{self.stored}"


@cache
def features() -> frozenset[str]:
    """What the CPU that code is compiled for can do, in LLVM's words: this one, or the one that Numba is told to take."""
    if numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None:
        return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    told = (numba.config.CPU_FEATURES or "").split(",")
    return frozenset(name.removeprefix("+") for name in told if name.startswith("+"))


def has_wide_vectors() -> bool:
    """Whether there are AVX-512 and its 32 registers."""
    return "avx512f" in features()


def converts_to_brain_floats() -> bool:
    """Whether two vectors can be converted to bfloat16 at once."""
    return has_wide_vectors() and {"avx512bf16", "avx512bw"} <= features()


def has_half_precision() -> bool:
    """Whether float16 can be converted in hardware; without, LLVM would call a function that nobody brings."""
    return platform.machine() not in {"x86_64", "AMD64"} or "f16c" in features()


def shape_of(form: Form) -> Shape:
    """The tile that fits this CPU's registers."""
    if not has_wide_vectors():
        return Shape(lanes=8, vectors=2, rows=4)
    if form.bits is None:
        return Shape(lanes=16, vectors=4, rows=6)
    if form.mode in SMALL_FLOATS:
        return Shape(lanes=16, vectors=2, rows=4)  # two sums an output
    return Shape(lanes=16, vectors=2, rows=8 if form.stored == "f32" else 4)


def converts(form: Form) -> bool:
    """Whether the product of a form rounds by the processor's conversion where that gives the same bits."""
    return form.mode == "affine" and form.bits is not None and form.stored == "bf16" and converts_to_brain_floats()


def fuses(form: Form) -> bool:
    """Whether the product of a form scales and biases in one operation where that gives the same bits.

    Where mlx contracts, its product does so always, and there is nothing to choose.
    """
    fast = (has_wide_vectors() or "fma" in features()) and not contraction.contracts()
    return form.mode == "affine" and form.bits is not None and form.stored == "f32" and fast


def source_digest() -> str:
    """SHA-256 over the sources of this folder, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def compiled(form: Form, folder: Path) -> Driver:
    """The product of a form, compiled now or read from the folder.

    Returns:
        run(x, rows, inner, weight, scales, biases, shift, y, width, blocks, control): x and y are addresses of float32
        [rows, inner] and [rows, width], width a multiple of the tile's columns; the weights are as the tiles want them; a
        group is 32 << shift, to which `TAME` is added where the matrix is tame; control is the address of int64 [SLOTS], whose
        NAN is 1 afterwards where a sum is NaN. Returns how many pieces were done by anyone so far.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder / source_digest()[:16])
    try:
        if form.mode in SMALL_FLOATS:
            return _small_floats(form)
        if form.bits is None:
            return _dense(form)
        if fuses(form):
            return _packed_choosing(form, form.bits, FUSED)
        return _packed_choosing(form, form.bits, CONVERTED) if converts(form) else _packed(form, form.bits)
    finally:
        numba.config.CACHE_DIR = before


SIGNATURE: Final = types.int64(*[types.int64] * 11)


def _name(form: Form) -> str:
    """What the product of a form is called: its form, its roundings and its tile."""
    shape = shape_of(form)
    flavour = "contracted" if contraction.contracts() else "separate"
    return f"{form.name}-{flavour}-{shape.lanes}x{shape.vectors}x{shape.rows}".replace("-", "_")


def _dense(form: Form) -> Driver:
    shape = shape_of(form)
    lanes, vectors, at_once, stored = shape.lanes, shape.vectors, shape.rows, STORED.index(form.stored)
    columns, size = shape.columns, 4 if form.stored == "f32" else 2

    @njit(SIGNATURE, cache=True, nogil=True)
    @named(_name(form))
    def run(x, rows, inner, weight, scales, biases, shift, y, width, blocks, control):
        nan = control + 8 * NAN
        runs = (rows + ROWS_A_PIECE - 1) // ROWS_A_PIECE
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= blocks * runs:
                return take(control + 8 * DONE, 0)
            block, first = piece // runs, piece % runs * ROWS_A_PIECE
            at, out = weight + block * inner * columns * size, y + block * columns * 4
            last = min(first + ROWS_A_PIECE, rows)
            if last - first == 1:
                into = out + first * width * 4
                dense_tile(lanes, vectors, 1, stored, x + first * inner * 4, inner, 1, at, inner, into, width, nan)
            else:
                for row in range(first, last, at_once):
                    valid, rows_in, into = min(at_once, last - row), x + row * inner * 4, out + row * width * 4
                    dense_tile(lanes, vectors, at_once, stored, rows_in, inner, valid, at, inner, into, width, nan)
            take(control + 8 * DONE, 1)

    return run


def _packed(form: Form, bits: int) -> Driver:
    shape = shape_of(form)
    lanes, vectors, at_once, rounding = shape.lanes, shape.vectors, shape.rows, STORED.index(form.stored)
    columns = shape.columns

    @njit(SIGNATURE, cache=True, nogil=True)
    @named(_name(form))
    def run(x, rows, inner, weight, scales, biases, shift, y, width, blocks, control):
        nan, shift = control + 8 * NAN, shift & (TAME - 1)
        runs = (rows + ROWS_A_PIECE - 1) // ROWS_A_PIECE
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= blocks * runs:
                return take(control + 8 * DONE, 0)
            block, first = piece // runs, piece % runs * ROWS_A_PIECE
            at, out = weight + block * (inner * bits // 32) * columns * 4, y + block * columns * 4
            group = block * (inner // (32 << shift)) * columns * 4
            last = min(first + ROWS_A_PIECE, rows)
            s, b = scales + group, biases + group
            if last - first == 1:
                rows_in, into = x + first * inner * 4, out + first * width * 4
                packed_tile(
                    lanes, vectors, 1, rounding, bits, rows_in, inner, 1, at, s, b, shift, inner, into, width, nan
                )
            else:
                for row in range(first, last, at_once):
                    valid, rows_in, into = min(at_once, last - row), x + row * inner * 4, out + row * width * 4
                    packed_tile(
                        lanes,
                        vectors,
                        at_once,
                        rounding,
                        bits,
                        rows_in,
                        inner,
                        valid,
                        at,
                        s,
                        b,
                        shift,
                        inner,
                        into,
                        width,
                        nan,
                    )
            take(control + 8 * DONE, 1)

    return run


def _packed_choosing(form: Form, bits: int, tamed: str) -> Driver:
    """Like `_packed`, with two roundings: one for tame matrices, where need be with tame rows, and one for the rest."""
    shape = shape_of(form)
    lanes, vectors, at_once, rounding = shape.lanes, shape.vectors, shape.rows, STORED.index(form.stored)
    columns, fast, any_rows = shape.columns, ROUNDINGS.index(tamed), tamed == FUSED

    @njit(SIGNATURE, cache=True, nogil=True)
    @named(_name(form))
    def run(x, rows, inner, weight, scales, biases, shift, y, width, blocks, control):
        nan, matrix_is_tame, shift = control + 8 * NAN, shift & TAME, shift & (TAME - 1)
        runs = (rows + ROWS_A_PIECE - 1) // ROWS_A_PIECE
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= blocks * runs:
                return take(control + 8 * DONE, 0)
            block, first = piece // runs, piece % runs * ROWS_A_PIECE
            w, out = weight + block * (inner * bits // 32) * columns * 4, y + block * columns * 4
            group = block * (inner // (32 << shift)) * columns * 4
            last = min(first + ROWS_A_PIECE, rows)
            s, b, i = scales + group, biases + group, inner
            at, to = x + first * inner * 4, out + first * width * 4
            tame = matrix_is_tame and (any_rows or is_tame(at, (last - first) * inner))
            if last - first == 1 and tame:
                packed_tile(lanes, vectors, 1, fast, bits, at, i, 1, w, s, b, shift, i, to, width, nan)
            elif last - first == 1:
                packed_tile(lanes, vectors, 1, rounding, bits, at, i, 1, w, s, b, shift, i, to, width, nan)
            else:
                for row in range(0, last - first, at_once):
                    n, xs, ys = min(at_once, last - first - row), at + row * inner * 4, to + row * width * 4
                    if tame:
                        packed_tile(lanes, vectors, at_once, fast, bits, xs, i, n, w, s, b, shift, i, ys, width, nan)
                    else:
                        packed_tile(
                            lanes, vectors, at_once, rounding, bits, xs, i, n, w, s, b, shift, i, ys, width, nan
                        )
            take(control + 8 * DONE, 1)

    return run


def _small_floats(form: Form) -> Driver:
    shape, (bits, elements) = shape_of(form), SMALL_FLOATS[form.mode]
    lanes, vectors, at_once, rounding = shape.lanes, shape.vectors, shape.rows, STORED.index(form.stored)
    columns = shape.columns

    @njit(SIGNATURE, cache=True, nogil=True)
    @named(_name(form))
    def run(x, rows, inner, weight, scales, biases, shift, y, width, blocks, control):
        nan = control + 8 * NAN
        runs = (rows + ROWS_A_PIECE - 1) // ROWS_A_PIECE
        while True:
            piece = take(control + 8 * NEXT, 1)
            if piece >= blocks * runs:
                return take(control + 8 * DONE, 0)
            block, first = piece // runs, piece % runs * ROWS_A_PIECE
            at, out = weight + block * (inner * bits // 32) * columns * 4, y + block * columns * 4
            s = scales + block * (inner // elements) * columns * 4
            last = min(first + ROWS_A_PIECE, rows)
            if last - first == 1:
                rows_in, into = x + first * inner * 4, out + first * width * 4
                float_tile(
                    lanes, vectors, 1, rounding, bits, elements, rows_in, inner, 1, at, s, inner, into, width, nan
                )
            else:
                for row in range(first, last, at_once):
                    valid, rows_in, into = min(at_once, last - row), x + row * inner * 4, out + row * width * 4
                    float_tile(
                        lanes,
                        vectors,
                        at_once,
                        rounding,
                        bits,
                        elements,
                        rows_in,
                        inner,
                        valid,
                        at,
                        s,
                        inner,
                        into,
                        width,
                        nan,
                    )
            take(control + 8 * DONE, 1)

    return run
