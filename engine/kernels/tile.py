# ruff: noqa: ANN401, ARG001, PLR0917 - Numba reads these signatures: arguments are types first and values later
# mypy: disable-error-code="untyped-decorator"
"""The inner loop as LLVM IR: a few rows of x against one block of output columns, in strict order of the input index.

One vector lane is one output, so nothing is ever summed across lanes and each output sees the scalar code's order: from +0,
one product rounded, one sum rounded, k after k (`VectorCode.multiply_add`). The instructions carry no fast-math flag, so LLVM
may neither reorder nor contract them. Weights are laid out by `engine.kernels.matrix`: all columns of a block at one k stand
together.

Not here: threads, tails, tensors. Addresses are plain integers; whoever calls answers for what they point to.
Source: spec/cpu.md sections 1 and 2.
"""

from typing import Any, Final

from numba import types
from numba.extending import intrinsic

from engine.kernels.vector_code import CONVERTED, FUSED, Shape, Value, VectorCode

STORED: Final = ("f32", "bf16", "f16")  # how dense weights are kept
ROUNDINGS: Final = (*STORED, CONVERTED, FUSED)  # what every operation on packed weights may round to
UNIT: Final = 32  # packed values that start on a word boundary at every width
GROUPS_AHEAD: Final = 8  # scales that the memory is asked for in advance, in groups
UNROLL: Final = 4  # k a turn of the dense loop with one row


# The compile-time arguments are literals rather than variables that a factory's tile closes over: Numba names compiled code
# on disk after what it closes over, and an intrinsic made anew has a new name in every process.


@intrinsic(prefer_literal=True)
def dense_tile(
    _typing: Any,
    lanes: Any,
    vectors: Any,
    rows: Any,
    stored: Any,
    x: Any,
    stride: Any,
    valid: Any,
    weight: Any,
    inner: Any,
    y: Any,
    width: Any,
    nan: Any,
) -> Any:
    """A tile over dense weights.

    Args (the first four are literals):
        lanes, vectors: See `Shape`.
        rows: 1, or the rows of the shape.
        stored: Index into `STORED`: how weights are kept.
        x, y: Addresses of float32 rows, `stride` and `width` elements apart, of which `valid` >= 1 exist.
        weight: Address of a block [inner, columns].
        nan: Address of an int64 that is set to 1 where a result is NaN.

    Numerics: weights widened exactly; then per k one float32 product and one float32 sum, each rounded; once for both where
        the wheel contracts (`engine.kernels.contraction`).
    """
    literals = literal_values(lanes, vectors, rows, stored)
    if literals is None:
        return None
    shape = Shape(lanes=literals[0], vectors=literals[1], rows=literals[2])
    kept = STORED[literals[3]]

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, stride, valid, weight, inner, y, width, nan = args[4:]
        code = VectorCode(builder, shape)
        inputs = code.row_addresses(x, stride, valid)
        size = shape.columns * (4 if kept == "f32" else 2)

        def body(k: Value, sums: list[Value]) -> list[Value]:
            base = builder.add(weight, builder.mul(k, code.i64(size)))
            if shape.rows == 1:
                code.ask_ahead(base, size)
            loaded = code.dense_weights(base, kept)
            return [
                code.multiply_add(xv, loaded[j], sums[r * shape.vectors + j])
                for r in range(shape.rows)
                for xv in [code.spread(inputs[r], k)]
                for j in range(shape.vectors)
            ]

        sums = [code.zero] * (shape.rows * shape.vectors)
        turn = UNROLL if shape.rows == 1 else 1
        whole = builder.and_(inner, code.i64(-turn))
        sums = code.loop(code.i64(0), whole, turn, sums, body)
        if turn > 1:
            sums = code.loop(whole, inner, 1, sums, body)
        code.store_rows(y, width, valid, nan, sums)
        return context.get_dummy_value()

    return types.void(lanes, vectors, rows, stored, *[types.int64] * 8), generate


@intrinsic(prefer_literal=True)
def packed_tile(
    _typing: Any,
    lanes: Any,
    vectors: Any,
    rows: Any,
    rounding: Any,
    bits: Any,
    x: Any,
    stride: Any,
    valid: Any,
    weight: Any,
    scales: Any,
    biases: Any,
    shift: Any,
    inner: Any,
    y: Any,
    width: Any,
    nan: Any,
) -> Any:
    """A tile over affine-packed weights.

    Args (the first five are literals):
        lanes, vectors: See `Shape`.
        rows: 1, or the rows of the shape.
        rounding: Index into `ROUNDINGS`: the dtype of the activations, to which every operation rounds.
        bits: 2, 3, 4, 5, 6 or 8.
        x, y: Addresses of float32 rows, `stride` and `width` elements apart, of which `valid` >= 1 exist.
        weight: Address of uint32 words [inner * bits / 32, columns].
        scales, biases: Addresses of float32 [inner / group, columns], group = 32 << shift.
        nan: Address of an int64 that is set to 1 where a result is NaN.

    Numerics: per k in order: scale * q, + bias, * x, and the sum, each rounded to float32 and then, where the activations are
        16 bits wide, to their dtype. In float32 where the wheel contracts: scale * q + bias, and x times that + the sum, each
        rounded once. `FUSED` is for scales whose products with every q are exact: a product and a sum of
        which only the sum can round are one fused operation.
    """
    literals = literal_values(lanes, vectors, rows, rounding, bits)
    if literals is None:
        return None
    shape = Shape(lanes=literals[0], vectors=literals[1], rows=literals[2])
    to, wide = ROUNDINGS[literals[3]], literals[4]

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, stride, valid, weight, scales, biases, shift, inner, y, width, nan = args[5:]
        code = VectorCode(builder, shape)
        inputs = code.row_addresses(x, stride, valid)

        def body(unit: Value, sums: list[Value]) -> list[Value]:
            sums = list(sums)
            base = builder.add(weight, builder.mul(unit, code.i64(4 * wide * shape.columns)))
            group = builder.mul(builder.lshr(unit, shift), code.i64(4 * shape.columns))
            scale = code.vectors(builder.add(scales, group), code.floats)
            bias = code.vectors(builder.add(biases, group), code.floats)
            words = [code.vectors(builder.add(base, code.i64(4 * shape.columns * n)), code.words) for n in range(wide)]
            if shape.rows == 1:
                code.ask_ahead(base, 4 * wide * shape.columns)
                for stream in (scales, biases):  # the machine's own foresight ends at every page of each stream
                    code.ask_ahead(builder.add(stream, group), 4 * shape.columns, GROUPS_AHEAD * 4 * shape.columns)
            for i in range(UNIT):
                k = builder.add(builder.mul(unit, code.i64(UNIT)), code.i64(i))
                q = [code.unpacked([word[j] for word in words], i, wide) for j in range(shape.vectors)]
                if to == FUSED:
                    unpacked = [code.fused(*three) for three in zip(scale, q, bias, strict=True)]
                else:
                    unpacked = code.multiply_adds(scale, q, bias, to)
                for r in range(shape.rows):
                    xv = [code.spread(inputs[r], k)] * shape.vectors
                    mine = slice(r * shape.vectors, (r + 1) * shape.vectors)
                    sums[mine] = code.multiply_adds(xv, unpacked, sums[mine], "f32" if to == FUSED else to)
            return sums

        sums = [code.zero] * (shape.rows * shape.vectors)
        sums = code.loop(code.i64(0), builder.lshr(inner, code.i64(5)), 1, sums, body)
        code.store_rows(y, width, valid, nan, sums)
        return context.get_dummy_value()

    return types.void(lanes, vectors, rows, rounding, bits, *[types.int64] * 11), generate


def literal_values(*given: Any) -> tuple[int, ...] | None:
    """Values of literal types; None where Numba tries the same call without literals first."""
    if not all(isinstance(kind, types.IntegerLiteral) for kind in given):
        return None
    return tuple(kind.literal_value for kind in given)
