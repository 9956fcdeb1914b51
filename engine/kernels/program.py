"""The parts of a model's forward, with the addresses of its weights: what the compiled step is given to do.

Guarantees: a program is made once for a model and is the same for every call: rows, positions and buffers are in the context.
It holds what its addresses point to.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from engine.kernels import fields as f
from engine.kernels.attending import scratch_floats
from engine.kernels.driver import SLOTS, Driver, Form
from engine.kernels.expert_words import Routing, expert_sum_part, routing_part
from engine.kernels.history import Geometry
from engine.kernels.layout import NAMES
from engine.kernels.part_list import PartList
from engine.kernels.part_words import (
    Place,
    Words,
    attention_part,
    gate_part,
    norm_part,
    rotation_part,
    row_norm_part,
    stored,
)
from engine.kernels.plan import DensePlan, ExpertsPlan, LayerPlan, Norm, NotFusedError, Outputs, Plan
from engine.kernels.step import StepCode
from engine.kernels.tile import STORED
from engine.norm import RMSNorm
from engine.rope import Rope

LINE: Final = 16  # floats


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
        code: Compiled parts.
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
    code: StepCode
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
class _Builder(PartList):
    """Puts the parts of a model together, block by block."""

    def program(self) -> Program:
        layers, E = self.plan.layers, self.plan.head_width
        shapes = {(self.count(layer.q) // E, self.count(layer.k) // E) for layer in layers}
        if len(shapes) != 1:
            raise NotFusedError("layers whose heads are not alike")
        ((heads, groups),) = shapes
        geometry = Geometry(layers=len(layers), groups=groups, width=E, columns=self.columns, dtype=self.plan.dtype)
        self.room(f.STREAM, self.plan.width)
        self.room(f.TURNED, heads * E)
        self.room(f.FRESH, groups * E)
        self.room(f.ATTENDED, heads * E)
        pending: _Branch | None = None
        rings: dict[int, int] = {}
        for index, layer in enumerate(layers):
            self._norm(layer.input_norm, pending)
            if layer.window is not None and layer.ring:
                rings[index] = layer.window
            self._attention(index, layer, geometry, heads // groups)
            place = self.product(layer.o, f.ATTENDED, f.SUMS, sync=True)
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
            code=self.code,
            held=self.held,
        )

    def _norm(self, norm: Norm | None, branch: _Branch | None) -> None:
        width, words = self.plan.width, self.norm_words(norm)
        if branch is None:
            self.add(norm_part(self.code, width=width, norm=words))
        else:
            multiplier = branch.multiplier
            self.add(
                norm_part(
                    self.code,
                    width=width,
                    norm=words,
                    added=branch.place,
                    post=self.norm_words(branch.post),
                    multiplier=None if multiplier is None else stored(multiplier, self.plan.dtype),
                    also=branch.also,
                )
            )
        self.room(f.NORMED, width)

    def _attention(self, index: int, layer: LayerPlan, geometry: Geometry, group: int) -> None:
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if (q_norm is None) != (k_norm is None):
            raise NotFusedError("a norm of queries alone or of keys alone")
        if q_norm is not None and k_norm is not None and q_norm.eps != k_norm.eps:
            raise NotFusedError("norms of queries and keys with different eps")
        q, k, v = self.products((layer.q, layer.k, layer.v), f.NORMED, (f.QUERIES, f.KEYS, f.VALUES))
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
            norms=tuple(0 if norm is None else self.address(norm.weight) for norm in (q_norm, k_norm)),
            eps=0.0 if q_norm is None else q_norm.eps,
            rope=layer.rope,
            table=0 if layer.rope is None else self.table(layer.rope),
            scale=layer.scale,
        )
        self.add(rotation)
        self.add(
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
        width = self.count(outputs)
        self.add(row_norm_part(self.code, place, width=width, norm=self.norm_words(norm), sync=sync))
        return replace(place, bias=0)

    def _mlp(self, mlp: DensePlan | ExpertsPlan, y: int) -> Place:
        if isinstance(mlp, ExpertsPlan):
            return self._experts(mlp, y)
        wanted = (mlp.gate,) if mlp.up is None else (mlp.gate, mlp.up)
        gate, *up = self.products(wanted, f.NORMED, (f.GATE, f.UP)[: len(wanted)])
        inner = self.count(mlp.gate)
        self.room(f.GATED, inner)
        self.add(gate_part(self.code, inner=inner, gate=gate, up=up[0] if up else None, activation=mlp.activation))
        return self.product(mlp.down, f.GATED, y, sync=True)

    def _experts(self, mlp: ExpertsPlan, y: int) -> Place:
        if y != f.SUMS:
            raise NotFusedError("experts beside the attention")
        many, k, width, inner = mlp.gate.experts, mlp.chosen, self.plan.width, mlp.gate.outputs
        routing = Routing(experts=many, chosen=k, width=width, kind=mlp.kind, normalised=mlp.normalised)
        self.add(routing_part(self.code, routing, self.product(mlp.router, f.NORMED, f.SCORES, sync=True)))
        for buffer, floats_a_row in (
            (f.SHARES, k),
            (f.CHOSEN, routing.table_floats),
            (f.GATHERED, k * width),
            (f.GATED, k * inner),
            (f.SUMS, width),
        ):
            self.room(buffer, floats_a_row)
        gate = self.expert_product(mlp, mlp.gate, routing, f.GATHERED, f.GATE, inner=width, sync=False)
        up = self.expert_product(mlp, mlp.up, routing, f.GATHERED, f.UP, inner=width, sync=True)
        self.add(gate_part(self.code, inner=inner, gate=gate, up=up, activation=mlp.activation, chosen=k))
        outputs = self.expert_product(mlp, mlp.down, routing, f.GATED, f.OUTPUTS, inner=inner, sync=True)
        self.add(expert_sum_part(self.code, routing, outputs))
        return Place(buffer=y, width=width)
