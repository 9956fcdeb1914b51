# ruff: noqa: ANN401 - llvmlite's values carry no types
# mypy: disable-error-code="import-untyped,no-untyped-call,misc"
"""The few instructions that tiles are made of, emitted as LLVM IR on vectors of one shape.

Guarantees: floating instructions carry no fast-math flag, so LLVM may neither reorder nor contract them; what is contracted is
said so (`multiply_add`). A lane is one output and no instruction mixes lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils

from engine.kernels import contraction

Value = Any

CONVERTED: Final = "bf16 by conversion"
AHEAD: Final = 4096  # bytes that the memory is asked for in advance
FUSED: Final = "f32, scale and bias at once"

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


class _Brain(ir.types.Type):
    """bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brain)

    def __hash__(self) -> int:
        return hash(_Brain)


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


class VectorCode:
    """Emits at a builder's position."""

    def __init__(self, builder: Any, shape: Shape) -> None:
        self.builder = builder
        self.shape = shape
        self.floats = ir.VectorType(_F32, shape.lanes)
        self.words = ir.VectorType(_I32, shape.lanes)
        self.zero = ir.Constant(self.floats, [0.0] * shape.lanes)

    def i64(self, value: int) -> Value:
        """A 64-bit constant."""
        return ir.Constant(_I64, value)

    def word(self, value: int) -> Value:
        """A 32-bit constant in every lane."""
        return ir.Constant(self.words, [value] * self.shape.lanes)

    def pointer(self, address: Value, pointee: Any) -> Value:
        """An integer address as a pointer."""
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

    def unpacked(self, words: list[Value], i: int, bits: int) -> Value:
        """The same as a float: four bits choose it among sixteen where the processor can."""
        b = self.builder
        if bits != 4 or self.shape.lanes != 16:
            return b.sitofp(self.unpack(words, i, bits), self.floats)
        kind = ir.FunctionType(self.floats, [self.floats, self.words])
        choose = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.permvar.sf.512")
        at, low = divmod(i * bits, 32)
        places = b.lshr(words[at], self.word(low)) if low else words[at]  # the bits above the lowest four do not count
        return b.call(choose, [ir.Constant(self.floats, [float(n) for n in range(16)]), places])

    def multiply_add(self, a: Value, b: Value, total: Value) -> Value:
        """total + a * b in float32, with the roundings of mlx's wheel for this machine."""
        if contraction.contracts():
            return self.fused(a, b, total)
        return self.builder.fadd(total, self.builder.fmul(a, b))

    def multiply_adds(self, a: list[Value], b: list[Value], totals: list[Value], to: str) -> list[Value]:
        """The same for some vectors; where `to` has 16 bits, product and sum are rounded to it one after the other."""
        if to == "f32":
            return [self.multiply_add(*three) for three in zip(a, b, totals, strict=True)]
        products = self.all_rounded([self.builder.fmul(x, y) for x, y in zip(a, b, strict=True)], to)
        return self.all_rounded([self.builder.fadd(t, p) for t, p in zip(totals, products, strict=True)], to)

    def fused(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{self.shape.lanes}f32")
        return self.builder.call(fma, [a, b, c])

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

    def all_rounded(self, values: list[Value], to: str) -> list[Value]:
        """Each of an even number of vectors to 16 bits and back, as `rounded` does.

        `CONVERTED` is bfloat16 by the processor's own conversion, two vectors of 16 lanes at once: the same bits for all but
        subnormal numbers, which it takes for zero.
        """
        if to != CONVERTED:
            return [self.rounded(value, to) for value in values]
        b, found = self.builder, []
        halves = ir.VectorType(_I16, 32)
        both = ir.FunctionType(ir.VectorType(_Brain(), 32), [self.floats, self.floats])
        convert = cgutils.get_or_insert_function(b.module, both, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
        for low, high in zip(values[::2], values[1::2], strict=True):
            pair = b.bitcast(b.call(convert, [high, low]), halves)
            for first in (0, 16):
                places = ir.Constant(ir.VectorType(_I32, 32), [n for i in range(16) for n in (32 + i, first + i)])
                spread = b.shuffle_vector(pair, ir.Constant(halves, [0] * 32), places)
                found.append(b.bitcast(spread, self.floats))
        return found

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

    def ask_ahead(self, address: Value, size: int, ahead: int = AHEAD) -> None:
        """Prefetch what the same loop will read some bytes on; past the end it is harmless."""
        b, pointer = self.builder, _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        prefetch = b.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        for offset in range(0, size, 64):
            at = self.pointer(b.add(address, self.i64(ahead + offset)), _I8)
            b.call(prefetch, [at, *(ir.Constant(_I32, n) for n in (0, 3, 1))])

    def loop(
        self, start: Value, stop: Value, step: int, sums: list[Value], body: Callable[[Value, list[Value]], list[Value]]
    ) -> list[Value]:
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
