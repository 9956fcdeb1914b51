"""A list of parts that grows: what is multiplied by which weights, where the results stand, and how much room that takes.

Guarantees: each address in the list is of an array that the list holds; a compiled product is never that of two forms.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import mlx.core as mx

from engine.kernels import fields as f
from engine.kernels.blocks import address_of
from engine.kernels.driver import Driver, Form
from engine.kernels.expert_words import Routing, expert_product_part
from engine.kernels.experts import FastExperts
from engine.kernels.layout import laid_out_for
from engine.kernels.matrix import FastMatrix, Laid
from engine.kernels.memory import entry
from engine.kernels.part_words import NOTHING, NormWords, Place, Words, floats, words_of
from engine.kernels.plan import ExpertsPlan, Norm, NotFusedError, Outputs, Plan
from engine.kernels.step import StepCode
from engine.linear import Linear
from engine.norm import LayerNorm
from engine.rope import Rope

NO_ROOM: Final = f.TABLE_WORDS  # two a rotation


@dataclass(slots=True, kw_only=True, eq=False)
class PartList:
    """The parts so far.

    Attributes:
        plan: What they are of.
        code: Compiled parts.
        driver: Compiled products.
        columns: Of a block of a float32 product.
        rows: Fields of each part in turn.
        widths: Floats a row of each buffer, by its word in the context.
        ropes: Rotations, in the order of their tables.
        held: Arrays that the parts point to.
        cost: Products of numbers a row.
        entries: Forms of compiled products, by their address.
    """

    plan: Plan
    code: StepCode
    driver: Callable[[Form], Driver | None]
    columns: int
    rows: list[Words] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)
    ropes: list[Rope] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    cost: int = 0
    entries: dict[int, Form] = field(default_factory=dict)

    def products(self, wanted: tuple[Outputs, ...], x: int, buffers: tuple[int, ...]) -> tuple[Place, ...]:
        """The products of all that is wanted, each projection once."""
        made: dict[int, Place] = {}
        last = wanted[-1].linear
        for outputs, y in zip(wanted, buffers, strict=True):
            if id(outputs.linear) not in made:
                made[id(outputs.linear)] = self.product(outputs.linear, x, y, sync=outputs.linear is last)
        return tuple(_within(made[id(outputs.linear)], outputs.first) for outputs in wanted)

    def product(self, linear: Linear, x: int, y: int, *, sync: bool) -> Place:
        """A product from buffer x to buffer y; where its sums stand."""
        laid = self.laid(linear)
        self.held.append(laid)
        run, width = self.driver(laid.form), width_of(laid)
        if run is None:
            raise NotFusedError(f"{linear.path} has no compiled product")
        inner, code = self.widths[x], self.entry(run, laid.form)
        weight, scales, biases = laid.addresses(0)
        self.add(
            {
                f.KIND: f.PRODUCT,
                f.CODE: code,
                f.SYNC: sync,
                f.X: x,
                f.Y: y,
                f.INNER: inner,
                f.WEIGHT: weight,
                f.SCALES: scales,
                f.BIASES: biases,
                f.SHIFT: laid.shift,
                f.WIDTH: width,
                f.BLOCKS: laid.blocks,
            }
        )
        self.room(y, width)
        self.cost += inner * width
        return Place(buffer=y, width=width, bias=self.address(linear.bias))

    def expert_product(
        self, mlp: ExpertsPlan, matrix: FastExperts, routing: Routing, x: int, y: int, *, inner: int, sync: bool
    ) -> Place:
        """A product with the matrix of each row's expert; where its sums stand."""
        laid = laid_out_for(matrix.laid(), self.plan.dtype)
        run = None if laid is None else self.driver(laid.form)
        if laid is None or run is None:
            raise NotFusedError(f"{mlp.path} has no compiled product")
        self.held.append(laid)
        width = width_of(laid) // routing.experts
        code = self.entry(run, laid.form)
        self.add(expert_product_part(self.code, code, laid, routing, x=x, y=y, inner=inner, sync=sync))
        self.room(y, routing.chosen * width)
        self.cost += routing.chosen * inner * width
        return Place(buffer=y, width=width)

    def entry(self, run: Driver, form: Form) -> int:
        """The address of a compiled product, which is of one form only."""
        code = entry(run)
        if self.entries.setdefault(code, form) != form:
            raise NotFusedError(f"one compiled product for {form.name} and for {self.entries[code].name}")
        return code

    def norm_words(self, norm: Norm | None) -> NormWords:
        """A norm as parts have it."""
        if norm is None:
            return NOTHING
        if isinstance(norm, LayerNorm):
            shift = self.address(norm.bias)
            return NormWords(weight=self.address(norm.weight), eps=norm.eps, kind=f.CENTRED, shift=shift)
        return NormWords(weight=self.address(norm.weight), eps=norm.eps)

    def count(self, outputs: Outputs) -> int:
        """How many outputs those are."""
        return self.laid(outputs.linear).outputs - outputs.first if outputs.count is None else outputs.count

    def laid(self, linear: Linear) -> Laid:
        """A projection's weights as its compiled product wants them."""
        laid = laid_out_for(linear.weight.laid(), self.plan.dtype) if isinstance(linear.weight, FastMatrix) else None
        if laid is None:
            raise NotFusedError(f"{linear.path} has no compiled product")
        return laid

    def add(self, words: dict[int, Any]) -> None:
        """The next part."""
        self.rows.append(words_of(words))

    def room(self, buffer: int, width: int) -> None:
        """A buffer's rows are at least so wide."""
        self.widths[buffer] = max(width, self.widths.get(buffer, 0))

    def table(self, rope: Rope) -> int:
        """Which table of the context's a rotation has."""
        for i, known in enumerate(self.ropes):
            if known is rope or alike(known, rope):
                return i
        if len(self.ropes) * 2 >= NO_ROOM:
            raise NotFusedError("more rotations than it has room for")
        self.ropes.append(rope)
        return len(self.ropes) - 1

    def address(self, weight: mx.array | None) -> int:
        """Where a float32 copy of a vector stands; 0 for none."""
        if weight is None:
            return 0
        copy = floats(weight)
        self.held.append(copy)
        return address_of(copy)


def width_of(laid: Laid) -> int:
    """Floats of a row of a product's sums."""
    return int(laid.blocks * laid.columns)


def _within(place: Place, first: int) -> Place:
    """Where outputs of a product stand that are not its first."""
    return replace(place, at=first, bias=place.bias + 4 * first if place.bias else 0)


def alike(a: Rope, b: Rope) -> bool:
    """Whether two rotations turn by the same angles: gain and pairs are fields of a part."""
    if (a.width, a.base, a.scale) != (b.width, b.base, b.scale):
        return False
    if a.periods is None or b.periods is None:
        return a.periods is b.periods
    return bool(mx.array_equal(a.periods.view(mx.uint32), b.periods.view(mx.uint32)))
