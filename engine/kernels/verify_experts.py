"""What the parts of experts make of rows, beside what mlx does: the choice, its order, its shares, and the weighted sum.

The products between are the compiled ones, which are held to mlx by themselves.

Guarantees: those of `engine.kernels.verify_step`, which compares the results.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from engine.kernels import fields as f
from engine.kernels.expert_words import Routing, expert_sum_part, routing_part
from engine.kernels.part_bench import SLACK, PartBench, Result, as_stored, drawn
from engine.kernels.part_words import Place, floats
from engine.kernels.routing import RUN_WORDS
from engine.kernels.step import StepCode
from engine.kernels.verify import DTYPES
from engine.moe import weighted_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProbe:
    """Experts of some rows.

    Attributes:
        dtype: Of the activations.
        rows: How many.
        experts: How many there are.
        chosen: For a row.
        width: Elements of a row.
        special: Key of `SPECIALS`.
        kind: How they are chosen.
        normalised: Whether shares are divided by their sum.
        bias: Whether scores have one.
        seed: Of everything random in it.
    """

    dtype: str
    rows: int
    experts: int
    chosen: int
    width: int = 24
    special: str = "ordinary"
    kind: int = f.PROBABLE
    normalised: bool = False
    bias: bool = False
    seed: int = 0


EXPERTS: Final[tuple[ExpertProbe, ...]] = tuple(
    ExpertProbe(
        dtype=dtype,
        rows=rows,
        experts=experts,
        chosen=chosen,
        special=special,
        kind=kind,
        normalised=rows > 1,
        bias=rows > 5,
    )
    for dtype in DTYPES
    for kind in (f.PROBABLE, f.HIGHEST)
    for rows, experts, chosen, special in (
        (1, 8, 2, "ordinary"),
        (40, 60, 4, "ordinary"),
        (9, 128, 8, "tiny"),
        (3, 4, 4, "huge"),
        (2, 16, 2, "infinite"),
        (2, 16, 2, "nan"),
        (5, 8, 1, "faint input"),
        (6, 5, 3, "faint weight"),
    )
)


def expert_results(code: StepCode, probe: ExpertProbe, threads: int) -> Iterator[Result]:
    """What mlx gives and what the parts give, in turn."""
    random = np.random.default_rng([probe.seed, probe.rows, probe.experts])
    bench = PartBench(code, probe.dtype, threads)
    dtype, rows, many, count, width = bench.dtype, probe.rows, probe.experts, probe.chosen, probe.width
    bench.context[f.ROWS] = rows
    routing = Routing(experts=many, chosen=count, width=width, kind=probe.kind, normalised=probe.normalised)
    raw = drawn(random, probe.special, rows, many + SLACK)
    exact, bias_at = mx.array(raw[:, :many]), 0
    if probe.bias:
        bias = as_stored(drawn(random, probe.special, many), dtype)
        exact, bias_at = exact + bias.astype(mx.float32), bench.keep(floats(bias))
    ids, expected = choice(exact.astype(dtype), probe)
    bench.buffer(f.SCORES, raw)
    x = bench.buffer(f.NORMED, drawn(random, "ordinary", rows, width))
    shares = bench.buffer(f.SHARES, np.zeros((rows, count), np.float32))
    bench.buffer(f.CHOSEN, np.zeros((rows, routing.table_floats), np.float32))
    gathered = bench.buffer(f.GATHERED, np.zeros((rows * count, width), np.float32))
    marked = bench.run(routing_part(code, routing, Place(buffer=f.SCORES, width=many + SLACK, bias=bias_at)))
    yield "shares of experts", expected, bench.stored(shares), marked
    table = bench.held_at(f.CHOSEN).view(np.int64)
    runs = table[1 : 1 + RUN_WORDS * table[0]].reshape(-1, RUN_WORDS)
    places = table[1 + RUN_WORDS * min(many, rows * count) :][: rows * count]
    owners = np.repeat(runs[:, 0], runs[:, 2])[places].reshape(rows, count)
    yield "choice of experts", ids.astype(mx.uint32), mx.array(owners.astype(np.uint32)), marked
    yield "rows of experts", mx.array(np.repeat(x, count, axis=0)), mx.array(gathered[places]), marked
    outputs = drawn(random, probe.special, rows * count, width + SLACK)
    bench.buffer(f.OUTPUTS, outputs)
    sums = bench.buffer(f.SUMS, np.zeros((rows, width), np.float32))
    marked = bench.run(expert_sum_part(code, routing, Place(buffer=f.OUTPUTS, width=width + SLACK)))
    ordered = mx.array(outputs[places, :width]).astype(dtype).reshape(rows, count, width)
    total = weighted_sum(ordered, expected)
    yield (
        "sum of experts",
        total,
        mx.array(sums).astype(dtype),  # whoever reads the sums rounds them
        marked or bool(np.isnan(sums).any()),
    )  # the norm that follows marks it


def choice(scores: mx.array, probe: ExpertProbe) -> tuple[mx.array, mx.array]:
    """The chosen experts and their shares, by mlx's operations."""
    if probe.kind == f.HIGHEST:
        ids = mx.argpartition(-scores, kth=probe.chosen - 1, axis=-1)[..., : probe.chosen]
        return ids, mx.softmax(mx.take_along_axis(scores, ids, axis=-1), axis=-1, precise=True)
    shares = mx.softmax(scores, axis=-1, precise=True)
    ids = mx.argpartition(shares, kth=-probe.chosen, axis=-1)[..., -probe.chosen :]
    shares = mx.take_along_axis(shares, ids, axis=-1)
    return ids, shares / shares.sum(axis=-1, keepdims=True) if probe.normalised else shares
