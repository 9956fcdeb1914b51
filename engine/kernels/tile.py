"""The inner loop as LLVM IR: a few rows of x against one block of output columns, in strict order of the input index.

One vector lane is one output, so nothing is ever summed across lanes and each output sees the scalar code's order: from +0,
one product rounded, one sum rounded, k after k. The instructions carry no fast-math flag, so LLVM may neither reorder nor
contract them. Weights are laid out by `engine.kernels.matrix`: all columns of a block at one k stand together.

Not here: threads, tails, tensors. Addresses are plain integers; whoever calls answers for what they point to.
Source: spec/cpu.md sections 1 and 2.
"""

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Value = Any  # llvmlite's values carry no types

STORED: Final = ("f32", "bf16", "f16")  # how dense weights are kept
UNIT: Final = 32  # packed values that start on a word boundary at every width
AHEAD: Final = 4096  # bytes that the memory is asked for in advance
UNROLL: Final = 4  # k a turn of the dense loop with one row

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much a tile holds in registers.

    Attributes:
        lanes: Floats of one vector.
        vectors: Vectors of one block; a block is lanes * vectors columns.
        rows: Rows of x that share one pass over the weights.
    """

    lanes: int
    vectors: int
    rows: int

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.lanes * self.vectors


# The compile-time arguments are literals rather than variables that a factory's tile closes over: Numba names compiled code
# on disk after what it closes over, and an intrinsic made anew has a new name in every process.


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator, unused-ignore]
def dense_tile(
    _typing: Any,
    lanes: Any,
    vectors: Any,
    rows: Any,
    stored: Any,
    x: Any,  # noqa: ARG001
    stride: Any,  # noqa: ARG001
    valid: Any,  # noqa: ARG001
    weight: Any,  # noqa: ARG001
    inner: Any,  # noqa: ARG001
    y: Any,  # noqa: ARG001
    width: Any,  # noqa: ARG001
    nan: Any,  # noqa: ARG001
) -> Any:
    """A tile over dense weights.

    Args (the first four are literals):
        lanes, vectors: See `Shape`.
        rows: 1, or the rows of the shape.
        stored: Index into `STORED`: how weights are kept.
        x, y: Addresses of float32 rows, `stride` and `width` elements apart, of which `valid` >= 1 exist.
        weight: Address of a block [inner, columns].
        nan: Address of an int64 that is set to 1 where a result is NaN.

    Numerics: weights widened exactly; then per k one float32 product and one float32 sum, each rounded.
    """
    literals = _literals(lanes, vectors, rows, stored)
    if literals is None:
        return None
    shape = Shape(lanes=literals[0], vectors=literals[1], rows=literals[2])
    kept = STORED[literals[3]]

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, stride, valid, weight, inner, y, width, nan = args[4:]
        code = _Code(builder, shape)
        inputs = code.row_addresses(x, stride, valid)
        size = shape.columns * (4 if kept == "f32" else 2)

        def body(k: Value, sums: list[Value]) -> list[Value]:
            base = builder.add(weight, builder.mul(k, code.i64(size)))
            if shape.rows == 1:
                code.ask_ahead(base, size)
            loaded = code.dense_weights(base, kept)
            return [
                builder.fadd(sums[r * shape.vectors + j], builder.fmul(xv, loaded[j]))
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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator, unused-ignore]
def packed_tile(
    _typing: Any,
    lanes: Any,
    vectors: Any,
    rows: Any,
    rounding: Any,
    bits: Any,
    x: Any,  # noqa: ARG001
    stride: Any,  # noqa: ARG001
    valid: Any,  # noqa: ARG001
    weight: Any,  # noqa: ARG001
    scales: Any,  # noqa: ARG001
    biases: Any,  # noqa: ARG001
    shift: Any,  # noqa: ARG001
    inner: Any,  # noqa: ARG001
    y: Any,  # noqa: ARG001
    width: Any,  # noqa: ARG001
    nan: Any,  # noqa: ARG001
) -> Any:
    """A tile over affine-packed weights.

    Args (the first five are literals):
        lanes, vectors: See `Shape`.
        rows: 1, or the rows of the shape.
        rounding: Index into `STORED`: the dtype of the activations, to which every operation rounds.
        bits: 2, 3, 4, 5, 6 or 8.
        x, y: Addresses of float32 rows, `stride` and `width` elements apart, of which `valid` >= 1 exist.
        weight: Address of uint32 words [inner * bits / 32, columns].
        scales, biases: Addresses of float32 [inner / group, columns], group = 32 << shift.
        nan: Address of an int64 that is set to 1 where a result is NaN.

    Numerics: per k in order: scale * q, + bias, * x, and the sum, each rounded to float32 and then, where the activations are
        16 bits wide, to their dtype.
    """
    literals = _literals(lanes, vectors, rows, rounding, bits)
    if literals is None:
        return None
    shape = Shape(lanes=literals[0], vectors=literals[1], rows=literals[2])
    to, wide = STORED[literals[3]], literals[4]

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, stride, valid, weight, scales, biases, shift, inner, y, width, nan = args[5:]
        code = _Code(builder, shape)
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
            for i in range(UNIT):
                k = builder.add(builder.mul(unit, code.i64(UNIT)), code.i64(i))
                unpacked = []
                for j in range(shape.vectors):
                    q = builder.sitofp(code.unpack([word[j] for word in words], i, wide), code.floats)
                    scaled = code.rounded(builder.fmul(scale[j], q), to)
                    unpacked.append(code.rounded(builder.fadd(scaled, bias[j]), to))
                for r in range(shape.rows):
                    xv = code.spread(inputs[r], k)
                    for j in range(shape.vectors):
                        product = code.rounded(builder.fmul(xv, unpacked[j]), to)
                        total = builder.fadd(sums[r * shape.vectors + j], product)
                        sums[r * shape.vectors + j] = code.rounded(total, to)
            return sums

        sums = [code.zero] * (shape.rows * shape.vectors)
        sums = code.loop(code.i64(0), builder.lshr(inner, code.i64(5)), 1, sums, body)
        code.store_rows(y, width, valid, nan, sums)
        return context.get_dummy_value()

    return types.void(lanes, vectors, rows, rounding, bits, *[types.int64] * 11), generate


def _literals(*given: Any) -> tuple[int, ...] | None:
    """Values of literal types; None where Numba tries the same call without literals first."""
    if not all(isinstance(kind, types.IntegerLiteral) for kind in given):
        return None
    return tuple(kind.literal_value for kind in given)


class _Code:
    """The few instructions that tiles are made of, on vectors of one shape."""

    def __init__(self, builder: Any, shape: Shape) -> None:
        self.builder = builder
        self.shape = shape
        self.floats = ir.VectorType(_F32, shape.lanes)
        self.words = ir.VectorType(_I32, shape.lanes)
        self.zero = ir.Constant(self.floats, [0.0] * shape.lanes)

    def i64(self, value: int) -> Value:
        return ir.Constant(_I64, value)

    def word(self, value: int) -> Value:
        return ir.Constant(self.words, [value] * self.shape.lanes)

    def pointer(self, address: Value, pointee: Any) -> Value:
        return self.builder.inttoptr(address, pointee.as_pointer())

    def vectors(self, address: Value, kind: Any) -> list[Value]:
        """One block's vectors of 32-bit elements."""
        size = 4 * self.shape.lanes
        at = (self.builder.add(address, self.i64(size * j)) for j in range(self.shape.vectors))
        return [self.builder.load(self.pointer(a, kind), align=4) for a in at]

    def dense_weights(self, address: Value, stored: str) -> list[Value]:
        """One block's weights at one k, widened to float32."""
        b, lanes = self.builder, self.shape.lanes
        if stored == "f32":
            return self.vectors(address, self.floats)
        loaded: list[Value] = []
        if stored == "f16":
            halves = ir.VectorType(ir.HalfType(), lanes)
            for j in range(self.shape.vectors):
                p = self.pointer(b.add(address, self.i64(2 * lanes * j)), halves)
                loaded.append(b.fpext(b.load(p, align=2), self.floats))
            return loaded
        for j in range(self.shape.vectors // 2):  # a word holds the same lane of two vectors, the first one low
            pair = b.load(self.pointer(b.add(address, self.i64(4 * lanes * j)), self.words), align=2)
            loaded.append(b.bitcast(b.shl(pair, self.word(16)), self.floats))
            loaded.append(b.bitcast(b.and_(pair, self.word(0xFFFF0000)), self.floats))
        return loaded

    def unpack(self, words: list[Value], i: int, bits: int) -> Value:
        """Value i of a unit: `bits` bits of a little-endian stream."""
        b, (at, low) = self.builder, divmod(i * bits, 32)
        value = b.lshr(words[at], self.word(low)) if low else words[at]
        if low + bits > 32:
            value = b.or_(value, b.shl(words[at + 1], self.word(32 - low)))
        return value if low + bits == 32 else b.and_(value, self.word((1 << bits) - 1))

    def rounded(self, value: Value, to: str) -> Value:
        """To 16 bits and back, ties to even; infinities and quiet NaN stay what they are."""
        b = self.builder
        if to == "f32":
            return value
        if to == "f16":
            return b.fpext(b.fptrunc(value, ir.VectorType(ir.HalfType(), self.shape.lanes)), self.floats)
        u = b.bitcast(value, self.words)
        is_odd = b.icmp_unsigned("!=", b.and_(u, self.word(0x10000)), self.word(0))
        u = b.add(u, b.select(is_odd, self.word(0x8000), self.word(0x7FFF)))
        return b.bitcast(b.and_(u, self.word(0xFFFF0000)), self.floats)

    def row_addresses(self, x: Value, stride: Value, valid: Value) -> list[Value]:
        """Addresses of the rows of x; those that do not exist stand for the last one that does."""
        b = self.builder
        found = []
        for r in range(self.shape.rows):
            exists = b.icmp_signed("<", self.i64(r), valid)
            row = b.select(exists, self.i64(r), b.sub(valid, self.i64(1)))
            found.append(self.pointer(b.add(x, b.mul(b.mul(row, stride), self.i64(4))), _F32))
        return found

    def spread(self, row: Value, k: Value) -> Value:
        """x[k] in every lane."""
        b, undefined = self.builder, ir.Constant(self.floats, ir.Undefined)
        one = b.insert_element(undefined, b.load(b.gep(row, [k]), align=4), ir.Constant(_I32, 0))
        return b.shuffle_vector(one, undefined, ir.Constant(self.words, [0] * self.shape.lanes))

    def ask_ahead(self, address: Value, size: int) -> None:
        """Prefetch what the same loop will read `AHEAD` bytes on; past the end it is harmless."""
        b, pointer = self.builder, _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        prefetch = b.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        for offset in range(0, size, 64):
            at = self.pointer(b.add(address, self.i64(AHEAD + offset)), _I8)
            b.call(prefetch, [at, *(ir.Constant(_I32, n) for n in (0, 3, 1))])

    def loop(self, start: Value, stop: Value, step: int, sums: list[Value], body: Any) -> list[Value]:
        """`body(k, sums)` for k from start to stop, `step` of them a turn; the sums afterwards."""
        b = self.builder
        entry, head, turn, done = b.block, *(b.append_basic_block(name) for name in ("head", "turn", "done"))
        b.branch(head)
        b.position_at_end(head)
        k = b.phi(_I64)
        held = [b.phi(self.floats) for _ in sums]
        b.cbranch(b.icmp_signed("<", k, stop), turn, done)
        b.position_at_end(turn)
        new = list(held)
        for u in range(step):
            new = body(b.add(k, self.i64(u)), new)
        following = b.add(k, self.i64(step))
        k.add_incoming(start, entry)
        k.add_incoming(following, b.block)
        for phi, before, after in zip(held, sums, new, strict=True):
            phi.add_incoming(before, entry)
            phi.add_incoming(after, b.block)
        b.branch(head)
        b.position_at_end(done)
        return held

    def store_rows(self, y: Value, width: Value, valid: Value, nan: Value, sums: list[Value]) -> None:
        """Write the rows that exist, and 1 to `nan` where one has a NaN; the others repeat the last one and its values."""
        b, lanes, vectors = self.builder, self.shape.lanes, self.shape.vectors
        found = ir.Constant(ir.VectorType(ir.IntType(1), lanes), [0] * lanes)
        for r, address in enumerate(self.row_addresses(y, width, valid)):
            base = b.ptrtoint(address, _I64)
            for j in range(vectors):
                value = sums[r * vectors + j]
                found = b.or_(found, b.fcmp_unordered("uno", value, value))
                b.store(value, self.pointer(b.add(base, self.i64(4 * lanes * j)), self.floats), align=4)
        some = b.icmp_unsigned("!=", b.bitcast(found, ir.IntType(lanes)), ir.Constant(ir.IntType(lanes), 0))
        with b.if_then(some, likely=False):
            b.store(self.i64(1), self.pointer(nan, _I64), align=8)
