"""What the parts of a step make of rows, beside what mlx does: norms, what is added to the stream, activations.

Guarantees: those of `engine.kernels.verify_step`, which compares the results.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from engine.activation import geglu, geglu_approx, gelu, swiglu
from engine.kernels import fields as f
from engine.kernels.history import Floats
from engine.kernels.part_bench import SLACK, PartBench, Result, as_stored, drawn
from engine.kernels.part_words import NOTHING, NormWords, Place, floats, gate_part, norm_part, row_norm_part, stored
from engine.kernels.step import StepCode
from engine.kernels.verify import DTYPES

GATED: Final = {f.SWIGLU: swiglu, f.GEGLU_APPROX: geglu_approx, f.GEGLU: geglu}
ACTIVATIONS: Final = (*GATED, f.GELU)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProbe:
    """Norms and activations of some rows.

    Attributes:
        dtype: Of the activations.
        rows: How many.
        width: Elements of one.
        special: Key of `SPECIALS`.
        bias: Whether sums have one.
        kind: Of the norm of the stream.
        shift: Whether that has a bias, where it is a centred one.
        post: Whether what is added is normalised.
        multiplier: Of what is added, or None.
        also: Whether something is added to that before.
        activation: Between products.
        joined: Whether gate and up are outputs of one product.
        seed: Of everything random in it.
    """

    dtype: str
    rows: int
    width: int
    special: str = "ordinary"
    bias: bool = False
    kind: int = f.RMS
    shift: bool = False
    post: bool = False
    multiplier: float | None = None
    also: bool = False
    activation: int = f.SWIGLU
    joined: bool = False
    seed: int = 0


ROWS: Final[tuple[RowProbe, ...]] = tuple(
    RowProbe(
        dtype=dtype,
        rows=rows,
        width=width,
        special=special,
        bias=rows > 1,
        kind=activation % 3,
        shift=rows > 1,
        post=rows == 3,
        multiplier=0.37 if rows > 1 else None,
        also=width % 2 == 1,
        activation=activation,
        joined=rows == 2,
    )
    for dtype in DTYPES
    for activation in ACTIVATIONS
    for rows, width, special in (
        (1, 64, "ordinary"),
        (3, 531, "tiny"),
        (2, 37, "huge"),
        (2, 40, "infinite"),
        (1, 24, "nan"),
        (1, 50, "faint input"),
        (2, 51, "faint weight"),
    )
)


def row_results(code: StepCode, probe: RowProbe, threads: int) -> Iterator[Result]:
    """What mlx gives and what the parts give, in turn."""
    made = _Rows(code, probe, threads)
    yield from made.norms()
    yield from made.activation()
    yield from made.whole_norm()


class _Rows:
    """A probe's values and the bench that they are on."""

    def __init__(self, code: StepCode, probe: RowProbe, threads: int) -> None:
        self.code = code
        self.probe = probe
        self.random = np.random.default_rng([probe.seed, probe.rows, probe.width])
        self.bench = PartBench(code, probe.dtype, threads)
        self.bench.context[f.ROWS] = probe.rows

    def drawn(self, *shape: int) -> Floats:
        return drawn(self.random, self.probe.special, *shape)

    def vector(self) -> tuple[mx.array, int]:
        """A weight or bias, and its address."""
        vector = as_stored(self.drawn(self.probe.width), self.bench.dtype)
        return vector, self.bench.keep(floats(vector))

    def sums(self, *words: int) -> list[tuple[mx.array, Place]]:
        """Sums in a buffer each, or all in the one; what mlx's product would have given with the bias, and where they are."""
        width, joined = self.probe.width, len(set(words)) == 1
        row = width * (len(words) if joined else 1) + SLACK
        raw = {word: self.drawn(self.probe.rows, row) for word in words}
        made = []
        for word, values in raw.items():
            self.bench.buffer(word, values)
        for i, word in enumerate(words):
            at = i * width if joined else 0
            exact, bias_at = mx.array(raw[word][:, at : at + width]), 0
            if self.probe.bias:
                bias, bias_at = self.vector()
                exact += bias.astype(mx.float32)
            made.append((exact.astype(self.bench.dtype), Place(buffer=word, width=row, at=at, bias=bias_at)))
        return made

    def norms(self) -> Iterator[Result]:
        """The norm of the stream alone, then of the stream and what is added to it."""
        probe, bench, width = self.probe, self.bench, self.probe.width
        stream = as_stored(self.drawn(probe.rows, width), bench.dtype)
        (weight, weight_at), (shift, shift_at), (post, post_at) = (self.vector() for _ in range(3))
        words = NormWords(weight=weight_at, eps=1e-5, kind=probe.kind, shift=shift_at if probe.shift else 0)

        def normed(x: mx.array) -> mx.array:
            if probe.kind == f.NO_NORM:
                return x
            if probe.kind == f.CENTRED:
                return mx.fast.layer_norm(x, weight, shift if probe.shift else None, 1e-5)
            return mx.fast.rms_norm(x, weight, 1e-5)

        held = bench.buffer(f.STREAM, np.array(stream.astype(mx.float32)))
        out = bench.buffer(f.NORMED, np.zeros((probe.rows, width), np.float32))
        marked = bench.run(norm_part(self.code, width=width, norm=words))
        yield "norm", normed(stream), bench.stored(out), marked
        ((branch, place),) = self.sums(f.SUMS)
        ((also, beside),) = self.sums(f.BRANCH)
        part = norm_part(
            self.code,
            width=width,
            norm=words,
            added=place,
            post=NormWords(weight=post_at, eps=1e-6) if probe.post else NOTHING,
            multiplier=None if probe.multiplier is None else stored(probe.multiplier, bench.dtype),
            also=beside if probe.also else None,
        )
        branch = mx.fast.rms_norm(branch, post, 1e-6) if probe.post else branch
        branch = branch if probe.multiplier is None else branch * probe.multiplier
        total = stream + (branch + also if probe.also else branch)
        marked = bench.run(part)
        yield "residual sum", total, bench.stored(held), marked
        yield "norm of the residual sum", normed(total), bench.stored(out), marked

    def activation(self) -> Iterator[Result]:
        """What stands between the products of a feed-forward layer."""
        probe, bench, width = self.probe, self.bench, self.probe.width
        (gate, gate_at), (up, up_at) = self.sums(f.GATE, f.GATE if probe.joined else f.UP)
        gated = bench.buffer(f.GATED, np.zeros((probe.rows, width), np.float32))
        alone = probe.activation == f.GELU
        expected = gelu(gate) if alone else GATED[probe.activation](gate, up)
        part = gate_part(self.code, inner=width, gate=gate_at, up=None if alone else up_at, activation=probe.activation)
        marked = bench.run(part) or bool(np.isnan(gated).any())  # the product that follows marks its NaN
        yield "activation", expected, bench.stored(gated), marked

    def whole_norm(self) -> Iterator[Result]:
        """The norm of all heads at once; what follows marks its NaN."""
        probe, bench, width = self.probe, self.bench, self.probe.width
        ((x, place),) = self.sums(f.QUERIES)
        weight, weight_at = self.vector()
        part = row_norm_part(self.code, place, width=width, norm=NormWords(weight=weight_at, eps=1e-5), sync=True)
        marked = bench.run(part)
        out = bench.held_at(f.QUERIES).reshape(probe.rows, -1)[:, :width]
        yield (
            "norm of a whole row",
            mx.fast.rms_norm(x, weight, 1e-5),
            bench.stored(out),
            marked or bool(np.isnan(out).any()),
        )
