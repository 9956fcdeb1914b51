"""Holding the parts of a step to mlx: random and special values, odd shapes, one row and many, windows; in about a second.

Guarantees: results are compared as the words that they are stored as. A part that marks a NaN has given the call back to mlx,
so nothing is compared then; that it marks one for ordinary values fails.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.activation import geglu_approx, swiglu
from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.quantized import EmptyQuantizedCache
from engine.cache.rotating import RotatingCache
from engine.kernels import fields as f
from engine.kernels.attending import scratch_floats
from engine.kernels.blocks import address_of
from engine.kernels.codes import packed_heads
from engine.kernels.driver import NAN, SLOTS, Form, shape_of
from engine.kernels.fused import turns
from engine.kernels.history import Floats, Geometry, History, Ring, aligned
from engine.kernels.packer import packed_geometry
from engine.kernels.part_words import (
    attention_part,
    floats,
    gate_part,
    norm_part,
    packing_part,
    rotation_part,
    words_of,
)
from engine.kernels.step import StepCode
from engine.kernels.team import Team
from engine.kernels.tile import STORED
from engine.kernels.verify import DTYPES, KernelError, sprinkled, words
from engine.rope import Rope, make_rope

SILENCE: Final = "report it; ASSAY_KERNELS=linear computes the same without the fused step and without this message"
INSTEAD: Final = "fast products alone"
FAINT: Final = np.float32(2.0**-64)  # products of such values are subnormal
ORDINARY: Final = frozenset({"ordinary", "tiny", "faint input", "faint weight"})  # nothing here may be left to mlx
SLACK: Final = 3  # floats that a row of sums is wider than what is in it


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProbe:
    """Norms and gated activations of some rows.

    Attributes:
        dtype: Of the activations.
        rows: How many.
        width: Elements of one.
        special: Key of `SPECIALS`.
        bias: Whether sums have one.
        post: Whether what is added is normalised.
        activation: Of the gate.
        seed: Of everything random in it.
    """

    dtype: str
    rows: int
    width: int
    special: str = "ordinary"
    bias: bool = False
    post: bool = False
    activation: int = f.SWIGLU
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProbe:
    """Attention of a sequence that comes in pieces.

    Attributes:
        dtype: Of the activations.
        pieces: Positions that come at once, in turn.
        groups: Heads of keys.
        group: Heads of queries for one of keys.
        width: Elements of a head.
        special: Key of `SPECIALS`.
        bias: Whether projections have one.
        norm: Whether heads are normalised.
        rope: `halves`, `neighbours`, `part`, `gain`, or None.
        window: Positions that a query sees, or None.
        packed: Bits and group size of the cache; None where it is kept as computed.
        seed: Of everything random in it.
    """

    dtype: str
    pieces: tuple[int, ...]
    groups: int = 2
    group: int = 3
    width: int = 16
    special: str = "ordinary"
    bias: bool = False
    norm: bool = False
    rope: str | None = "halves"
    window: int | None = None
    packed: tuple[int, int] | None = None
    seed: int = 0


Probe = RowProbe | HeadProbe
ROWS: Final[tuple[RowProbe, ...]] = tuple(
    RowProbe(dtype=dtype, rows=rows, width=width, special=special, bias=rows > 1, post=rows == 3, activation=activation)
    for dtype in DTYPES
    for activation in (f.SWIGLU, f.GEGLU_APPROX)
    for rows, width, special in (
        (1, 64, "ordinary"),
        (3, 531, "tiny"),
        (2, 37, "huge"),
        (2, 40, "infinite"),
        (1, 24, "nan"),
        (1, 50, "faint input"),
        (2, 50, "faint weight"),
    )
)
HEADS: Final[tuple[HeadProbe, ...]] = tuple(
    HeadProbe(dtype=dtype, **probe)
    for dtype in DTYPES
    for probe in (
        {"pieces": (1, 1, 18, 1, 50, 1)},
        {"pieces": (67, 1, 1), "bias": True, "norm": True, "group": 1, "width": 70, "rope": "part"},
        {"pieces": (20, 1), "special": "tiny", "rope": "neighbours"},
        {"pieces": (9, 1), "special": "huge", "rope": "gain"},
        {"pieces": (9, 1), "special": "infinite", "rope": None},
        {"pieces": (4, 1), "special": "nan"},
        {"pieces": (20, 1), "special": "faint input"},
        {"pieces": (3, 1), "special": "faint weight"},
        {"pieces": (5, 1, 1, 1, 1, 9, 1, 1, 2, *(1,) * 8), "window": 6, "norm": True},
    )
)
CROSSING: Final = (
    HeadProbe(dtype="f32", pieces=(250, 1, 9, 1), groups=1, group=2, width=8),
    HeadProbe(dtype="f32", pieces=(250, 1, 9, 1), groups=1, group=2, width=32, packed=(8, 32)),
)  # from one slab to the next
HEADS_TO_PACK: Final[tuple[dict[str, Any], ...]] = (
    {"pieces": (1, 1, 18, 1, 50, 1), "width": 96, "packed": (8, 32)},
    {"pieces": (67, 1), "width": 128, "packed": (4, 64), "bias": True, "norm": True, "group": 1, "rope": "part"},
    {"pieces": (3, 1), "width": 128, "packed": (2, 128)},
    {"pieces": (20, 1), "width": 32, "packed": (3, 32), "special": "tiny"},
    {"pieces": (9, 1), "width": 64, "packed": (6, 32), "special": "huge"},
    {"pieces": (9, 1), "width": 32, "packed": (5, 32), "special": "infinite", "rope": None},
    {"pieces": (4, 1), "width": 32, "packed": (8, 32), "special": "nan"},
    {"pieces": (20, 1), "width": 32, "packed": (4, 32), "special": "faint input"},
)
PACKED: Final = tuple(HeadProbe(dtype=dtype, **probe) for dtype in DTYPES for probe in HEADS_TO_PACK)


def verify_step(code: StepCode) -> None:
    """Compare every probe.

    Raises:
        KernelError: A result differs from mlx's.
    """
    probes: tuple[Probe, ...] = (*ROWS, *HEADS, *CROSSING, *PACKED)
    for probe in probes:
        check_part(code, probe)


def check_part(code: StepCode, probe: Probe) -> None:
    """Compare one probe, on one thread and on three.

    Raises:
        KernelError: A result differs from mlx's.
    """
    for threads in (1, 3):
        results = _rows(code, probe, threads) if isinstance(probe, RowProbe) else _heads(code, probe, threads)
        for name, expected, actual, marked in results:
            ordinary = probe.special in ORDINARY
            if marked and not ordinary:
                break  # mlx's: and so is everything after it
            if marked or (words(expected) != words(actual)).any():
                raise KernelError(
                    f"the {name} of the fused step does not give mlx's bits here",
                    probe=probe,
                    threads=threads,
                    reason="it marks a NaN where there is none" if marked else "another word",
                    instead=INSTEAD,
                    next_step=SILENCE,
                )


class _Bench:
    """Buffers and a context for parts that are run by themselves."""

    def __init__(self, code: StepCode, dtype: str, threads: int) -> None:
        self.code = code
        self.dtype = DTYPES[dtype]
        self.context = np.zeros(f.CONTEXT_WORDS, np.int64)
        self.context[f.ROUNDING] = STORED.index(dtype)
        self.team = Team(threads=threads)
        self.held: list[Any] = []

    def keep(self, array: Floats) -> int:
        """Address of an array that lives as long as this does."""
        self.held.append(array)
        return address_of(array)

    def buffer(self, word: int, values: Floats) -> Floats:
        """A buffer with values in it."""
        copy = aligned(values.size)
        copy[:] = values.reshape(-1)
        self.context[word] = self.keep(copy)
        return copy.reshape(values.shape)

    def run(self, *parts: dict[int, int]) -> bool:
        """Run parts in turn; whether one marked a NaN."""
        program = np.array([words_of(part) for part in parts], np.int64)
        control = np.zeros((len(parts), SLOTS), np.int64)
        context = self.context.copy()

        def work(_: int) -> int:
            return int(self.code.run(address_of(program), len(parts), address_of(context), address_of(control)))

        self.team.run(work, len(parts), threads=self.team.threads)
        return bool(control[:, NAN].any())

    def stored(self, array: Floats) -> mx.array:
        """A buffer in the dtype of the activations: exact, because every element was rounded to it."""
        return mx.array(np.ascontiguousarray(array)).astype(self.dtype)


def _values(random: np.random.Generator, probe: Probe, *shape: int) -> Floats:
    """Float32 values, special ones among them, or all of them faint."""
    drawn = sprinkled(random, shape, probe.special)
    return drawn * FAINT if probe.special.startswith("faint") else drawn


def _rounded(values: Floats, dtype: mx.Dtype) -> mx.array:
    return mx.array(values).astype(dtype)


Result = tuple[str, mx.array, mx.array, bool]


def _rows(code: StepCode, probe: RowProbe, threads: int) -> Iterator[Result]:
    random = np.random.default_rng([probe.seed, probe.rows, probe.width])
    bench = _Bench(code, probe.dtype, threads)
    dtype, rows, width = bench.dtype, probe.rows, probe.width
    bench.context[f.ROWS] = rows

    def sums(word: int) -> tuple[mx.array, int]:
        """A buffer of sums, and what mlx's product would have given with the bias; the bias' address."""
        raw = _values(random, probe, rows, width + SLACK)
        bench.buffer(word, raw)
        exact = mx.array(raw[:, :width])
        if not probe.bias:
            return exact.astype(dtype), 0
        bias = _rounded(_values(random, probe, width), dtype)
        return (exact + bias.astype(mx.float32)).astype(dtype), bench.keep(floats(bias))

    stream = _rounded(_values(random, probe, rows, width), dtype)
    weight, post = (_rounded(_values(random, probe, width), dtype) for _ in range(2))
    held = bench.buffer(f.STREAM, np.array(stream.astype(mx.float32)))
    out = bench.buffer(f.NORMED, np.zeros((rows, width), np.float32))
    weight_at, post_at = bench.keep(floats(weight)), bench.keep(floats(post))
    marked = bench.run(norm_part(code, width=width, weight=weight_at, eps=1e-5))
    yield "norm", mx.fast.rms_norm(stream, weight, 1e-5), bench.stored(out), marked
    added, bias_at = sums(f.SUMS)
    part = norm_part(
        code,
        width=width,
        weight=weight_at,
        eps=1e-6,
        sums=width + SLACK,
        bias=bias_at,
        post=post_at if probe.post else 0,
        post_eps=1e-5,
    )
    total = stream + (mx.fast.rms_norm(added, post, 1e-5) if probe.post else added)
    marked = bench.run(part)
    yield "residual sum", total, bench.stored(held), marked
    yield "norm of the residual sum", mx.fast.rms_norm(total, weight, 1e-6), bench.stored(out), marked
    (gate, gate_at), (up, up_at) = sums(f.GATE), sums(f.UP)
    gated = bench.buffer(f.GATED, np.zeros((rows, width), np.float32))
    activation = {f.SWIGLU: swiglu, f.GEGLU_APPROX: geglu_approx}[probe.activation]
    widths = width + SLACK, width + SLACK
    part = gate_part(code, inner=width, widths=widths, biases=(gate_at, up_at), activation=probe.activation)
    marked = bench.run(part) or bool(np.isnan(gated).any())  # the product that follows marks its NaN
    yield "gated activation", activation(gate, up), bench.stored(gated), marked


def _heads(code: StepCode, probe: HeadProbe, threads: int) -> Iterator[Result]:
    random = np.random.default_rng([probe.seed, probe.width, *probe.pieces])
    bench = _Bench(code, probe.dtype, threads)
    dtype, E, K, G = bench.dtype, probe.width, probe.groups, probe.group
    rope, scale = _rope(probe), E**-0.5
    columns = shape_of(Form(stored="f32")).columns
    geometry = Geometry(layers=1, groups=K, width=E, columns=columns, dtype=dtype)
    if probe.packed is not None:
        geometry = packed_geometry(geometry, bits=probe.packed[0], group_size=probe.packed[1])
    history = History(geometry=geometry)
    window = probe.window
    cache: Any = PlainCache() if window is None else RotatingCache(max_size=window)
    ring = None if window is None else Ring(max_size=window)
    if probe.packed is not None:
        cache = EmptyQuantizedCache(bits=probe.packed[0], group_size=probe.packed[1])
    norms = [_rounded(_values(random, probe, E), dtype) for _ in range(2)] if probe.norm else []
    biases = [_rounded(_values(random, probe, n * E), dtype) for n in (K * G, K, K)] if probe.bias else []
    rotation = rotation_part(
        code,
        geometry,
        layer=0,
        group=G,
        widths=(K * G * E, K * E + SLACK, K * E),
        biases=tuple(bench.keep(floats(bias)) for bias in biases) or (0, 0, 0),
        norms=tuple(bench.keep(floats(norm)) for norm in norms) or (0, 0),
        eps=1e-5,
        rope=rope,
        table=0,
        scale=scale,
    )
    attention = attention_part(code, geometry, layer=0, group=G, window=window)
    packing = [] if probe.packed is None else [packing_part(code, geometry, layer=0)]
    if rope is not None:
        for i, table in enumerate(turns(rope, sum(probe.pieces), dtype)):
            bench.context[f.TABLES + i] = bench.keep(table)
    for L in probe.pieces:
        offset, history = history.offset, history.extended(L)
        ring = None if ring is None else ring.advanced(L)
        order = np.array([ring.held, ring.index] if ring is not None and L == 1 else [0, 0], np.int64)
        slabs = np.array([address_of(slab.memory) for slab in history.slabs], np.int64)
        size = scratch_floats(rows=L, positions=history.offset, group=G, head_blocks=geometry.blocks, columns=columns)
        scratch = aligned(size * threads)
        for word, value in (
            (f.ROWS, L),
            (f.OFFSET, offset),
            (f.SLABS, address_of(slabs)),
            (f.RINGS, address_of(order)),
            (f.SCRATCH, address_of(scratch)),
            (f.SCRATCH_SIZE, 4 * size),
        ):
            bench.context[word] = value
        bench.held += [slabs, order, scratch, history]
        bench.buffer(f.TURNED, np.zeros((K * G, L, E), np.float32))
        bench.buffer(f.FRESH, np.zeros((L, K, E), np.float32))
        out = bench.buffer(f.ATTENDED, np.zeros((L, K * G * E), np.float32))
        heads = []
        for i, (word, count) in enumerate(((f.QUERIES, K * G), (f.KEYS, K), (f.VALUES, K))):
            raw = _values(random, probe, L, count * E + (SLACK if i == 1 else 0))
            bench.buffer(word, raw)
            exact = mx.array(raw[:, : count * E])
            exact = exact + biases[i].astype(mx.float32) if biases else exact
            x_BLHE = exact.astype(dtype).reshape(1, L, count, E)
            x_BLHE = mx.fast.rms_norm(x_BLHE, norms[i], 1e-5) if norms and i < 2 else x_BLHE
            x_BHLE = x_BLHE.swapaxes(1, 2)
            heads.append(x_BHLE if rope is None or i == 2 else rope(x_BHLE, offset))
        mask = cache.mask(L, window=window)
        cache, keys, values = cache.append(heads[1], heads[2])
        expected = attend(heads[0], keys, values, scale=scale, mask=mask).swapaxes(1, 2).reshape(L, -1)
        marked = bench.run(rotation, *packing, attention)
        yield "attention", expected, bench.stored(out), marked
        if packing:
            for right, found in zip((keys, values), packed_heads(history, 0), strict=True):
                yield "codes", right.weight.view(mx.float32), found.weight.view(mx.float32), marked
                yield "scales", right.scales, found.scales, marked
                yield "biases", right.biases, found.biases, marked


def _rope(probe: HeadProbe) -> Rope | None:
    if probe.rope is None:
        return None
    if probe.rope == "gain":
        scaling = {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16}
        return make_rope(probe.width, base=100.0, scaling=scaling)
    width = probe.width // 2 if probe.rope == "part" else probe.width
    return make_rope(width - width % 2, base=100.0, traditional=probe.rope == "neighbours")
