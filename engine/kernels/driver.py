# ruff: noqa: ANN001, ANN202, ANN401, ARG001, PLR0917 - Numba reads these signatures; what is compiled takes integers only
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
from typing import Any, Final

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.tile import STORED, dense_tile, packed_tile
from engine.kernels.vector_code import Shape

Driver = Callable[..., int]

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
    """

    stored: str
    bits: int | None = None

    @property
    def name(self) -> str:
        """Such as `dense-bf16` or `packed-4-f32`."""
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


def has_half_precision() -> bool:
    """Whether float16 can be converted in hardware; without, LLVM would call a function that nobody brings."""
    return platform.machine() not in {"x86_64", "AMD64"} or "f16c" in features()


def shape_of(form: Form) -> Shape:
    """The tile that fits this CPU's registers."""
    if not has_wide_vectors():
        return Shape(lanes=8, vectors=2, rows=4)
    if form.bits is None:
        return Shape(lanes=16, vectors=4, rows=6)
    return Shape(lanes=16, vectors=2, rows=8 if form.stored == "f32" else 4)


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
        group is 32 << shift; control is the address of int64 [SLOTS], whose NAN is 1 afterwards
        where a sum is NaN. Returns how many pieces were done by anyone so far.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder / source_digest()[:16])
    try:
        return _dense(form) if form.bits is None else _packed(form, form.bits)
    finally:
        numba.config.CACHE_DIR = before


SIGNATURE: Final = types.int64(*[types.int64] * 11)
_I64 = ir.IntType(64)


@intrinsic
def _take(_typing: Any, _address: Any, _by: Any) -> Any:
    """Add to a word that other threads add to; the value before."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _dense(form: Form) -> Driver:
    shape = shape_of(form)
    lanes, vectors, at_once, stored = shape.lanes, shape.vectors, shape.rows, STORED.index(form.stored)
    columns, size = shape.columns, 4 if form.stored == "f32" else 2

    @njit(SIGNATURE, cache=True, nogil=True)
    def run(x, rows, inner, weight, scales, biases, shift, y, width, blocks, control):
        nan = control + 8 * NAN
        runs = (rows + ROWS_A_PIECE - 1) // ROWS_A_PIECE
        while True:
            piece = _take(control + 8 * NEXT, 1)
            if piece >= blocks * runs:
                return _take(control + 8 * DONE, 0)
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
            _take(control + 8 * DONE, 1)

    return run


def _packed(form: Form, bits: int) -> Driver:
    shape = shape_of(form)
    lanes, vectors, at_once, rounding = shape.lanes, shape.vectors, shape.rows, STORED.index(form.stored)
    columns = shape.columns

    @njit(SIGNATURE, cache=True, nogil=True)
    def run(x, rows, inner, weight, scales, biases, shift, y, width, blocks, control):
        nan = control + 8 * NAN
        runs = (rows + ROWS_A_PIECE - 1) // ROWS_A_PIECE
        while True:
            piece = _take(control + 8 * NEXT, 1)
            if piece >= blocks * runs:
                return _take(control + 8 * DONE, 0)
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
            _take(control + 8 * DONE, 1)

    return run
