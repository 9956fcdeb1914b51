"""A weight matrix with a compiled product of its own, in place of the one that the checkpoint gave.

Guarantees: nothing is ever computed in another way than mlx would: the matrix is given back bit for bit wherever the compiled
product does not fit. The checkpoint's array is let go once it is laid out. A product with a NaN in it is mlx's own: where two
NaN meet in a sum, whose bits survive is a choice of mlx's compiler that differs from kernel to kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Final

import mlx.core as mx
import numpy as np

from engine.kernels.blocks import address_of
from engine.kernels.driver import NAN, ROWS_A_PIECE, Driver, Form
from engine.kernels.layout import Affine, Dense, Floats, laid_out_for, lay_out
from engine.kernels.small_floats import SmallFloats
from engine.kernels.team import Team
from engine.linear import Packed

Laid = Dense | Affine | SmallFloats
_BYTES_A_THREAD: Final = 500_000  # weights that are worth waking a thread for
_STEPS_A_THREAD: Final = 1_500_000  # products that are


@dataclass(slots=True, kw_only=True, eq=False)
class FastMatrix:
    """A matrix [out, in] with a compiled product; laid out when it is first used.

    Attributes:
        driver: The compiled product of a form, or None where it was not proved.
        team: Threads.
        plain: The matrix as the checkpoint has it; None once it is laid out.
    """

    driver: Callable[[Form], Driver | None]
    team: Team
    plain: mx.array | Packed | None
    _laid: Laid | None = None

    def product(self, x: mx.array, bias: mx.array | None = None) -> mx.array:
        """x @ W.T + bias for x [..., in]; result [..., out].

        Numerics: those of mlx: dense, the float32 sum gets the bias in float32 and is rounded once; packed, the bias is added
            to the rounded product.
        Source: spec/cpu.md section 1.
        """
        laid = laid_out_for(self.laid(), x.dtype)
        driver = None if laid is None else self.driver(laid.form)
        if laid is None or driver is None or x.size == 0 or (bias is not None and bias.dtype != x.dtype):
            return plain_product(x, self.restored(), bias)
        total = self._sums(driver, laid, x)
        if total is None:
            return plain_product(x, self.restored(), bias)
        if bias is None:
            return total if x.dtype == mx.float32 else total.astype(x.dtype)
        if not isinstance(laid, Dense):
            return total.astype(x.dtype) + bias
        return (total + bias.astype(mx.float32)).astype(x.dtype)

    def restored(self) -> mx.array | Packed:
        """The matrix as the checkpoint has it."""
        if self.plain is not None:
            return self.plain
        assert self._laid is not None  # noqa: S101 - one of the two is always there
        return self._laid.restored()

    def laid(self) -> Laid:
        """The matrix as the compiled product wants it."""
        if self._laid is None:
            assert self.plain is not None  # noqa: S101 - one of the two is always there
            self._laid, self.plain = lay_out(self.plain), None
        return self._laid

    def _sums(self, driver: Driver, laid: Laid, x: mx.array) -> mx.array | None:
        """float32 [..., out]; None where one is NaN."""
        wide = x if x.dtype == mx.float32 else x.astype(mx.float32)
        mx.eval(wide)
        rows = prod(x.shape[:-1])
        values = np.ascontiguousarray(np.asarray(wide)).reshape(rows, x.shape[-1])
        y = run(driver, self.team, laid, values)
        if y is None:
            return None
        return mx.array(y if y.shape[1] == laid.outputs else np.ascontiguousarray(y[:, : laid.outputs])).reshape(
            *x.shape[:-1], laid.outputs
        )


def plain_product(x: mx.array, weight: mx.array | Packed, bias: mx.array | None) -> mx.array:
    """x @ W.T + bias by mlx: what the compiled products are held to."""
    if isinstance(weight, Packed):
        return weight.product(x) if bias is None else weight.product(x) + bias
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def run(
    driver: Driver, team: Team, laid: Laid, x: Floats, *, first: int = 0, blocks: int | None = None
) -> Floats | None:
    """The sums of x [rows, in] with some blocks of a matrix, by default all; [rows, columns]; None where one is NaN."""
    rows, inner = x.shape
    count = laid.blocks if blocks is None else blocks
    width, weights = count * laid.columns, laid.addresses(first)
    y = np.empty((rows, width), np.float32)

    def work(control: int) -> int:  # holds x and y for as long as any thread may touch them
        at, into = address_of(x), address_of(y)
        return driver(at, rows, inner, *weights, laid.shift, into, width, count, control)

    pieces = count * -(-rows // ROWS_A_PIECE)
    size = laid.size * count // laid.blocks
    worth = max(size // _BYTES_A_THREAD, rows * inner * width // _STEPS_A_THREAD)
    control = team.run(work, pieces, threads=max(1, worth))
    return None if control[NAN] else y
