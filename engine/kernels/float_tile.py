# ruff: noqa: ANN401, ARG001, PLR0917 - Numba reads these signatures: arguments are types first and values later
# mypy: disable-error-code="untyped-decorator"
"""The inner loop over weights of small floats (mxfp4, nvfp4, mxfp8): groups summed by themselves, then scaled.

One vector lane is one output, as in `engine.kernels.tile`, and the instructions carry no fast-math flag. Elements are widened
by integer operations and a select, so no denormal number is ever multiplied.

Not here: threads, tails, tensors, scales as bytes. Source: tests/engine/test_linear.py (order and roundings, found by running).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.tile import STORED, UNIT, literal_values
from engine.kernels.vector_code import Shape, Value, VectorCode


@intrinsic(prefer_literal=True)
def float_tile(
    _typing: Any,
    lanes: Any,
    vectors: Any,
    rows: Any,
    rounding: Any,
    bits: Any,
    group: Any,
    x: Any,
    stride: Any,
    valid: Any,
    weight: Any,
    scales: Any,
    inner: Any,
    y: Any,
    width: Any,
    nan: Any,
) -> Any:
    """A tile over weights of small floats.

    Args (the first six are literals):
        lanes, vectors: See `Shape`.
        rows: 1, or the rows of the shape.
        rounding: Index into `STORED`: the dtype of the activations, to which every operation rounds.
        bits: 4 (e2m1) or 8 (e4m3).
        group: Elements a scale, 16 or 32.
        x, y: Addresses of float32 rows, `stride` and `width` elements apart, of which `valid` >= 1 exist.
        weight: Address of uint32 words [inner * bits / 32, columns].
        scales: Address of float32 [inner / group, columns], already rounded to the dtype of the activations.
        nan: Address of an int64 that is set to 1 where a result is NaN.

    Numerics: within a group per k in order: element * x and the sum from +0, then that sum * scale, added to the total; each
        rounded to float32 and then, where the activations are 16 bits wide, to their dtype.
    """
    given = literal_values(lanes, vectors, rows, rounding, bits, group)
    if given is None:
        return None
    shape = Shape(lanes=given[0], vectors=given[1], rows=given[2])
    to, wide, grouped = STORED[given[3]], given[4], given[5]

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, stride, valid, weight, scales, inner, y, width, nan = args[6:]
        code = VectorCode(builder, shape)
        inputs = code.row_addresses(x, stride, valid)

        def body(unit: Value, sums: list[Value]) -> list[Value]:
            sums = list(sums)
            base = builder.add(weight, builder.mul(unit, code.i64(4 * wide * shape.columns)))
            words = [code.vectors(builder.add(base, code.i64(4 * shape.columns * n)), code.words) for n in range(wide)]
            if shape.rows == 1:
                code.ask_ahead(base, 4 * wide * shape.columns)
            for first in range(0, UNIT, grouped):
                index = builder.add(builder.mul(unit, code.i64(UNIT // grouped)), code.i64(first // grouped))
                scale = code.vectors(builder.add(scales, builder.mul(index, code.i64(4 * shape.columns))), code.floats)
                within = [code.zero] * len(sums)
                for i in range(first, first + grouped):
                    k = builder.add(builder.mul(unit, code.i64(UNIT)), code.i64(i))
                    elements = [
                        element(code, code.unpack([word[j] for word in words], i, wide), wide)
                        for j in range(shape.vectors)
                    ]
                    for r in range(shape.rows):
                        xv = code.spread(inputs[r], k)
                        mine = slice(r * shape.vectors, (r + 1) * shape.vectors)
                        within[mine] = code.multiply_adds([xv] * shape.vectors, elements, within[mine], to)
                sums = code.multiply_adds(within, scale * shape.rows, sums, to)
            return sums

        sums = [code.zero] * (shape.rows * shape.vectors)
        sums = code.loop(code.i64(0), builder.lshr(inner, code.i64(5)), 1, sums, body)
        code.store_rows(y, width, valid, nan, sums)
        return context.get_dummy_value()

    return types.void(lanes, vectors, rows, rounding, bits, group, *[types.int64] * 9), generate


def element(code: VectorCode, packed: Value, bits: int) -> Value:
    """Small floats as float32, exactly: e2m1 of 4 bits, e4m3 of 8 bits, whose largest magnitude is NaN.

    Args:
        code: Emits here.
        packed: Vector of words, each an element in its lowest bits.
        bits: 4 or 8.
    """
    b = code.builder
    mantissa, bias = (1, 1) if bits == 4 else (3, 7)
    magnitude = b.and_(packed, code.word((1 << (bits - 1)) - 1))
    sign = b.shl(b.and_(packed, code.word(1 << (bits - 1))), code.word(32 - bits))
    normal = b.add(b.shl(magnitude, code.word(23 - mantissa)), code.word((127 - bias) << 23))
    step = ir.Constant(code.floats, [2.0 ** (1 - bias - mantissa)] * code.shape.lanes)
    subnormal = b.bitcast(b.fmul(b.sitofp(magnitude, code.floats), step), code.words)
    is_normal = b.icmp_unsigned(">=", magnitude, code.word(1 << mantissa))
    chosen = b.select(is_normal, normal, subnormal)
    if bits == 8:
        is_nan = b.icmp_unsigned("==", magnitude, code.word(0x7F))
        chosen = b.select(is_nan, code.word(0x7FC00000), chosen)
    return b.bitcast(b.or_(chosen, sign), code.floats)
