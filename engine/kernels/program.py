"""The parts of a model's forward, with the addresses of its weights: what the compiled step is given to do.

Guarantees: a program is made once for a model and is the same for every call: rows, positions and buffers are in the context.
It holds what its addresses point to.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.kernels import fields as f
from engine.kernels.attending import scratch_floats
from engine.kernels.blocks import address_of
from engine.kernels.driver import SLOTS, Driver, Form
from engine.kernels.expert_words import Routing, expert_product_part, expert_sum_part, routing_part
from engine.kernels.experts import FastExperts
from engine.kernels.history import Geometry
from engine.kernels.layout import NAMES, laid_out_for
from engine.kernels.matrix import FastMatrix, Laid
from engine.kernels.memory import entry
from engine.kernels.part_words import (
    NOTHING,
    NormWords,
    Place,
    Words,
    attention_part,
    floats,
    gate_part,
    norm_part,
    rotation_part,
    row_norm_part,
    stored,
    words_of,
)
from engine.kernels.plan import DensePlan, ExpertsPlan, LayerPlan, Norm, NotFusedError, Outputs, Plan
from engine.kernels.step import StepCode
from engine.kernels.tile import STORED
from engine.linear import Linear
from engine.norm import LayerNorm, RMSNorm
from engine.rope import Rope

LINE: Final = 16  # floats
NO_ROOM: Final = f.TABLE_WORDS  # two a rotation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What a step does.

    Attributes:
        parts: Fields of each part in turn, [count, FIELDS].
        geometry: Of slabs.
        group: Heads of queries that share a head of keys.
        widths: Floats a row of each buffer, by its word in the context.
        ropes: Rotations, in the order of their tables.
        rings: Window of each layer that has one, by layer.
        rounding: Index into `STORED`.
        cost: Products of numbers a row.
        held: Arrays that the parts point to.
    """

    parts: Words
    geometry: Geometry
    group: int
    widths: dict[int, int]
    ropes: tuple[Rope, ...]
    rings: dict[int, int]
    rounding: int
    cost: int
    held: list[Any]

    def scratch(self, rows: int, positions: int) -> int:
        """Floats a thread for a call of some rows that end at some position."""
        attention = scratch_floats(
            rows=rows,
            positions=positions,
            group=self.group,
            head_blocks=self.geometry.blocks,
            columns=self.geometry.columns,
        )
        return -(-max(attention, 2 * SLOTS) // LINE) * LINE  # a product of experts has control words of its own there


def build_program(plan: Plan, code: StepCode, driver: Callable[[Form], Driver | None], *, columns: int) -> Program:
    """The program of a plan.

    Args:
        plan: From `plan_of`.
        code: Compiled parts.
        driver: Compiled products.
        columns: Of a block of a float32 product, by which keys and values are stored.

    Raises:
        NotFusedError: Layers differ in their heads, or there are more rotations than a context has words for.
    """
    return _Builder(plan=plan, code=code, driver=driver, columns=columns).program()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Branch:
    """What is added to the stream before the next norm.

    Attributes:
        place: Where it stands.
        post: Norm of it, or None.
        multiplier: Of it, or None.
        also: What is added to it before, or None.
    """

    place: Place
    post: RMSNorm | None
    multiplier: float | None
    also: Place | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Builder:
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

    def program(self) -> Program:
        layers, E = self.plan.layers, self.plan.head_width
        shapes = {(self._count(layer.q) // E, self._count(layer.k) // E) for layer in layers}
        if len(shapes) != 1:
            raise NotFusedError("layers whose heads are not alike")
        ((heads, groups),) = shapes
        geometry = Geometry(layers=len(layers), groups=groups, width=E, columns=self.columns, dtype=self.plan.dtype)
        self._room(f.STREAM, self.plan.width)
        self._room(f.TURNED, heads * E)
        self._room(f.FRESH, groups * E)
        self._room(f.ATTENDED, heads * E)
        pending: _Branch | None = None
        rings: dict[int, int] = {}
        for index, layer in enumerate(layers):
            self._norm(layer.input_norm, pending)
            if layer.window is not None and layer.ring:
                rings[index] = layer.window
            self._attention(index, layer, geometry, heads // groups)
            place = self._product(layer.o, f.ATTENDED, f.SUMS, sync=True)
            pending = _Branch(place=place, post=layer.attention_norm, multiplier=layer.multiplier)
            if layer.parallel:
                pending = replace(pending, also=self._mlp(layer.mlp, f.BRANCH))
            else:
                self._norm(layer.mlp_input_norm, pending)
                place = self._mlp(layer.mlp, f.SUMS)
                pending = _Branch(place=place, post=layer.mlp_norm, multiplier=layer.multiplier)
        self._norm(self.plan.norm, pending)
        return Program(
            parts=np.array(self.rows, np.int64),
            geometry=geometry,
            group=heads // groups,
            widths=self.widths,
            ropes=tuple(self.ropes),
            rings=rings,
            rounding=STORED.index(NAMES[self.plan.dtype]),
            cost=self.cost,
            held=self.held,
        )

    def _products(self, wanted: tuple[Outputs, ...], x: int, buffers: tuple[int, ...]) -> tuple[Place, ...]:
        """The products of all that is wanted, each projection once."""
        made: dict[int, Place] = {}
        last = wanted[-1].linear
        for outputs, y in zip(wanted, buffers, strict=True):
            if id(outputs.linear) not in made:
                made[id(outputs.linear)] = self._product(outputs.linear, x, y, sync=outputs.linear is last)
        return tuple(_within(made[id(outputs.linear)], outputs.first) for outputs in wanted)

    def _product(self, linear: Linear, x: int, y: int, *, sync: bool) -> Place:
        laid = self._laid(linear)
        self.held.append(laid)
        run, width = self.driver(laid.form), width_of(laid)
        if run is None:
            raise NotFusedError(f"{linear.path} has no compiled product")
        inner, code = self.widths[x], self._entry(run, laid.form)
        weight, scales, biases = laid.addresses(0)
        self._add(
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
        self._room(y, width)
        self.cost += inner * width
        return Place(buffer=y, width=width, bias=self._address(linear.bias))

    def _norm(self, norm: Norm | None, branch: _Branch | None) -> None:
        width, words = self.plan.width, self._norm_words(norm)
        if branch is None:
            self._add(norm_part(self.code, width=width, norm=words))
        else:
            multiplier = branch.multiplier
            self._add(
                norm_part(
                    self.code,
                    width=width,
                    norm=words,
                    added=branch.place,
                    post=self._norm_words(branch.post),
                    multiplier=None if multiplier is None else stored(multiplier, self.plan.dtype),
                    also=branch.also,
                )
            )
        self._room(f.NORMED, width)

    def _norm_words(self, norm: Norm | None) -> NormWords:
        if norm is None:
            return NOTHING
        if isinstance(norm, LayerNorm):
            shift = self._address(norm.bias)
            return NormWords(weight=self._address(norm.weight), eps=norm.eps, kind=f.CENTRED, shift=shift)
        return NormWords(weight=self._address(norm.weight), eps=norm.eps)

    def _attention(self, index: int, layer: LayerPlan, geometry: Geometry, group: int) -> None:
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if (q_norm is None) != (k_norm is None):
            raise NotFusedError("a norm of queries alone or of keys alone")
        if q_norm is not None and k_norm is not None and q_norm.eps != k_norm.eps:
            raise NotFusedError("norms of queries and keys with different eps")
        q, k, v = self._products((layer.q, layer.k, layer.v), f.NORMED, (f.QUERIES, f.KEYS, f.VALUES))
        if layer.whole_norms and q_norm is not None and k_norm is not None:
            q = self._whole_norm(layer.q, q, q_norm, sync=False)
            k = self._whole_norm(layer.k, k, k_norm, sync=True)
            q_norm = k_norm = None
        rotation = rotation_part(
            self.code,
            geometry,
            layer=index,
            group=group,
            places=(q, k, v),
            norms=tuple(0 if norm is None else self._address(norm.weight) for norm in (q_norm, k_norm)),
            eps=0.0 if q_norm is None else q_norm.eps,
            rope=layer.rope,
            table=0 if layer.rope is None else self._table(layer.rope),
            scale=layer.scale,
        )
        self._add(rotation)
        self._add(
            attention_part(
                self.code,
                geometry,
                layer=index,
                group=group,
                window=layer.window,
                ring=layer.ring,
                cap=layer.cap,
            )
        )

    def _whole_norm(self, outputs: Outputs, place: Place, norm: RMSNorm, *, sync: bool) -> Place:
        """A norm over all heads in place, which finishes the product too."""
        if place.at:
            raise NotFusedError("a norm over a part of a projection")
        width = self._count(outputs)
        self._add(row_norm_part(self.code, place, width=width, norm=self._norm_words(norm), sync=sync))
        return replace(place, bias=0)

    def _mlp(self, mlp: DensePlan | ExpertsPlan, y: int) -> Place:
        if isinstance(mlp, ExpertsPlan):
            return self._experts(mlp, y)
        wanted = (mlp.gate,) if mlp.up is None else (mlp.gate, mlp.up)
        gate, *up = self._products(wanted, f.NORMED, (f.GATE, f.UP)[: len(wanted)])
        inner = self._count(mlp.gate)
        self._room(f.GATED, inner)
        self._add(gate_part(self.code, inner=inner, gate=gate, up=up[0] if up else None, activation=mlp.activation))
        return self._product(mlp.down, f.GATED, y, sync=True)

    def _experts(self, mlp: ExpertsPlan, y: int) -> Place:
        if y != f.SUMS:
            raise NotFusedError("experts beside the attention")
        many, k, width, inner = mlp.gate.experts, mlp.chosen, self.plan.width, mlp.gate.outputs
        routing = Routing(experts=many, chosen=k, width=width, kind=mlp.kind, normalised=mlp.normalised)
        self._add(routing_part(self.code, routing, self._product(mlp.router, f.NORMED, f.SCORES, sync=True)))
        for buffer, floats_a_row in (
            (f.SHARES, k),
            (f.CHOSEN, routing.table_floats),
            (f.GATHERED, k * width),
            (f.GATED, k * inner),
            (f.SUMS, width),
        ):
            self._room(buffer, floats_a_row)
        gate = self._expert_product(mlp, mlp.gate, routing, f.GATHERED, f.GATE, inner=width, sync=False)
        up = self._expert_product(mlp, mlp.up, routing, f.GATHERED, f.UP, inner=width, sync=True)
        self._add(gate_part(self.code, inner=inner, gate=gate, up=up, activation=mlp.activation, chosen=k))
        outputs = self._expert_product(mlp, mlp.down, routing, f.GATED, f.OUTPUTS, inner=inner, sync=True)
        self._add(expert_sum_part(self.code, routing, outputs))
        return Place(buffer=y, width=width)

    def _expert_product(
        self, mlp: ExpertsPlan, matrix: FastExperts, routing: Routing, x: int, y: int, *, inner: int, sync: bool
    ) -> Place:
        laid = laid_out_for(matrix.laid(), self.plan.dtype)
        run = None if laid is None else self.driver(laid.form)
        if laid is None or run is None:
            raise NotFusedError(f"{mlp.path} has no compiled product")
        self.held.append(laid)
        width = width_of(laid) // routing.experts
        code = self._entry(run, laid.form)
        self._add(expert_product_part(self.code, code, laid, routing, x=x, y=y, inner=inner, sync=sync))
        self._room(y, routing.chosen * width)
        self.cost += routing.chosen * inner * width
        return Place(buffer=y, width=width)

    def _entry(self, run: Driver, form: Form) -> int:
        """The address of a compiled product, which is of one form only."""
        code = entry(run)
        if self.entries.setdefault(code, form) != form:
            raise NotFusedError(f"one compiled product for {form.name} and for {self.entries[code].name}")
        return code

    def _count(self, outputs: Outputs) -> int:
        return self._laid(outputs.linear).outputs - outputs.first if outputs.count is None else outputs.count

    def _laid(self, linear: Linear) -> Laid:
        laid = laid_out_for(linear.weight.laid(), self.plan.dtype) if isinstance(linear.weight, FastMatrix) else None
        if laid is None:
            raise NotFusedError(f"{linear.path} has no compiled product")
        return laid

    def _add(self, words: dict[int, Any]) -> None:
        self.rows.append(words_of(words))

    def _room(self, buffer: int, width: int) -> None:
        self.widths[buffer] = max(width, self.widths.get(buffer, 0))

    def _table(self, rope: Rope) -> int:
        for i, known in enumerate(self.ropes):
            if known is rope or alike(known, rope):
                return i
        if len(self.ropes) * 2 >= NO_ROOM:
            raise NotFusedError("more rotations than it has room for")
        self.ropes.append(rope)
        return len(self.ropes) - 1

    def _address(self, weight: mx.array | None) -> int:
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
