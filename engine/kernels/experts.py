"""Stacked expert matrices with a compiled product of their own: each row goes through the matrix that was chosen for it.

Guarantees: those of `engine.kernels.matrix`; rows of one expert are multiplied together, which changes no bit because every
sum is computed by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import mlx.core as mx
import numpy as np

from engine.kernels.driver import Driver, Form, shape_of
from engine.kernels.layout import NAMES, Floats, laid_out_for, lay_out
from engine.kernels.matrix import Laid, run
from engine.kernels.team import Team
from engine.linear import Packed
from engine.moe import gathered_product


@dataclass(slots=True, kw_only=True, eq=False)
class FastExperts:
    """Matrices [X, out, in] with a compiled product; laid out when they are first used.

    Attributes:
        driver: The compiled product of a form, or None where it was not proved.
        team: Threads.
        plain: The matrices as the checkpoint has them; None once they are laid out.
        experts: X.
        outputs: `out`.
    """

    driver: Callable[[Form], Driver | None]
    team: Team
    plain: mx.array | Packed | None
    experts: int
    outputs: int
    _laid: Laid | None = None

    @classmethod
    def of(cls, weight: mx.array | Packed, *, driver: Callable[[Form], Driver | None], team: Team) -> "FastExperts":
        """Take supported matrices."""
        stacked = weight.weight if isinstance(weight, Packed) else weight
        return cls(driver=driver, team=team, plain=weight, experts=stacked.shape[0], outputs=stacked.shape[1])

    def product(self, x: mx.array, experts: mx.array, *, sorted_experts: bool) -> mx.array:
        """Product of x [..., 1, in] with the matrix named for it in `experts` [...]; [..., 1, out]; see `ExpertLinear`.

        Numerics: those of mlx.
        Source: spec/cpu.md section 1.
        """
        laid = laid_out_for(self.laid(), x.dtype)
        driver = None if laid is None else self.driver(laid.form)
        if laid is None or driver is None or x.shape[-2] != 1 or experts.size == 0:
            return gathered_product(x, self.restored(), experts, sorted_experts=sorted_experts)
        sums = self._sums(driver, laid, x, experts)
        if sums is None:
            return gathered_product(x, self.restored(), experts, sorted_experts=sorted_experts)
        y = mx.array(sums).reshape(*experts.shape, 1, self.outputs)
        return y if x.dtype == mx.float32 else y.astype(x.dtype)

    def _sums(self, driver: Driver, laid: Laid, x: mx.array, experts: mx.array) -> Floats | None:
        """float32 [rows, out], a row a choice; None where one is NaN."""
        wide = x if x.dtype == mx.float32 else x.astype(mx.float32)
        mx.eval(wide, experts)
        inner, rows = x.shape[-1], prod(experts.shape)
        values = np.broadcast_to(np.asarray(wide), (*experts.shape, 1, inner)).reshape(rows, inner)
        chosen = np.asarray(experts).reshape(rows)
        y = np.empty((rows, self.outputs), np.float32)
        blocks = laid.blocks // self.experts
        for expert in np.unique(chosen):
            its = np.flatnonzero(chosen == expert)
            picked = np.ascontiguousarray(values[its])
            sums = run(driver, self.team, laid, picked, first=int(expert) * blocks, blocks=blocks)
            if sums is None:
                return None
            y[its] = sums[:, : self.outputs]
        return y

    def laid(self) -> Laid:
        """The matrices as the compiled product wants them, one expert's after the other's."""
        if self._laid is None:
            assert self.plain is not None  # noqa: S101 - one of the two is always there
            self._laid, self.plain = lay_out(_flat(self.plain)), None
        return self._laid

    def restored(self) -> mx.array | Packed:
        """The matrices as the checkpoint has them."""
        if self.plain is not None:
            return self.plain
        assert self._laid is not None  # noqa: S101 - one of the two is always there
        flat = self._laid.restored()

        def stacked(array: mx.array) -> mx.array:
            return mx.contiguous(mx.unflatten(array, 0, (self.experts, -1))[:, : self.outputs])

        if not isinstance(flat, Packed):
            return stacked(flat)
        return Packed(
            weight=stacked(flat.weight),
            scales=stacked(flat.scales),
            biases=None if flat.biases is None else stacked(flat.biases),
            format=flat.format,
        )


def _flat(weight: mx.array | Packed) -> mx.array | Packed:
    """[X, out, in] as [X * out, in], each expert's rows up to whole blocks, so that no block belongs to two."""
    columns = shape_of(_form(weight)).columns

    def padded(array: mx.array) -> mx.array:
        return mx.pad(array, [(0, 0), (0, -array.shape[1] % columns), (0, 0)]).flatten(0, 1)

    if not isinstance(weight, Packed):
        return padded(weight)
    return Packed(
        weight=padded(weight.weight),
        scales=padded(weight.scales),
        biases=None if weight.biases is None else padded(weight.biases),
        format=weight.format,
    )


def _form(weight: mx.array | Packed) -> Form:
    if not isinstance(weight, Packed):
        return Form(stored=NAMES[weight.dtype])
    if weight.format.mode != "affine":
        return Form(stored="f32", bits=weight.format.bits, mode=weight.format.mode)
    return Form(stored=NAMES[weight.scales.dtype], bits=weight.format.bits)
