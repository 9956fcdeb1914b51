"""Holding the parts of a step to mlx: random and special values, odd shapes, one row and many, windows; in about a second.

Guarantees: results are compared as the words that they are stored as. A part that marks a NaN has given the call back to mlx,
so nothing is compared then; that it marks one for ordinary values fails.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.activation import soft_capped
from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.quantized import EmptyQuantizedCache
from engine.cache.rotating import RotatingCache
from engine.kernels import fields as f
from engine.kernels.attending import scratch_floats
from engine.kernels.blocks import address_of
from engine.kernels.codes import packed_heads
from engine.kernels.driver import Form, has_half_precision, shape_of
from engine.kernels.fused import turns
from engine.kernels.history import Geometry, History, Ring, aligned
from engine.kernels.packer import packed_geometry
from engine.kernels.part_bench import SLACK, PartBench, Result, as_stored, drawn
from engine.kernels.part_words import Place, attention_part, floats, packing_part, rotation_part
from engine.kernels.step import StepCode
from engine.kernels.verify import DTYPES, KernelError, words
from engine.kernels.verify_experts import EXPERTS, ExpertProbe, expert_results
from engine.kernels.verify_rows import ROWS, RowProbe, row_results
from engine.rope import Rope, make_rope

SILENCE: Final = "report it; ASSAY_KERNELS=linear computes the same without the fused step and without this message"
INSTEAD: Final = "fast products alone"
ORDINARY: Final = frozenset({"ordinary", "tiny", "faint input", "faint weight"})  # nothing here may be left to mlx


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
        ring: Whether no more positions than those are kept.
        cap: Soft cap on the scores, or None.
        joined: Whether queries, keys and values are outputs of one product.
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
    ring: bool = True
    cap: float | None = None
    joined: bool = False
    seed: int = 0


Probe = RowProbe | HeadProbe | ExpertProbe
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
        {"pieces": (5, 1, 9, 1, 22, 1, 1), "window": 6, "ring": False},
        {"pieces": (19, 1), "cap": 1.7, "joined": True, "bias": True},
        {"pieces": (6, 1), "cap": 30.0, "special": "huge", "joined": True},
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
    probes: tuple[Probe, ...] = (*ROWS, *HEADS, *CROSSING, *PACKED, *EXPERTS)
    for probe in probes:
        if probe.dtype != "f16" or has_half_precision():  # without, no model in float16 has a fused step
            check_part(code, probe)


def check_part(code: StepCode, probe: Probe) -> None:
    """Compare one probe, on one thread and on three.

    Raises:
        KernelError: A result differs from mlx's.
    """
    for threads in (1, 3):
        for name, expected, actual, marked in _results(code, probe, threads):
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


def _results(code: StepCode, probe: Probe, threads: int) -> Iterator[Result]:
    if isinstance(probe, RowProbe):
        return row_results(code, probe, threads)
    return expert_results(code, probe, threads) if isinstance(probe, ExpertProbe) else _heads(code, probe, threads)


def _heads(code: StepCode, probe: HeadProbe, threads: int) -> Iterator[Result]:
    random = np.random.default_rng([probe.seed, probe.width, *probe.pieces])
    bench = PartBench(code, probe.dtype, threads)
    dtype, E, K, G = bench.dtype, probe.width, probe.groups, probe.group
    rope, scale = _rope(probe), E**-0.5
    geometry = _geometry(probe, dtype)
    history = History(geometry=geometry)
    cache, ring = _empty(probe)
    norms = [as_stored(drawn(random, probe.special, E), dtype) for _ in range(2)] if probe.norm else []
    biases = [as_stored(drawn(random, probe.special, n * E), dtype) for n in (K * G, K, K)] if probe.bias else []
    at = [bench.keep(floats(bias)) for bias in biases] or [0, 0, 0]
    rotation = rotation_part(
        code,
        geometry,
        layer=0,
        group=G,
        places=_places(probe, at),
        norms=tuple(bench.keep(floats(norm)) for norm in norms) or (0, 0),
        eps=1e-5,
        rope=rope,
        table=0,
        scale=scale,
    )
    attention = attention_part(code, geometry, layer=0, group=G, window=probe.window, ring=probe.ring, cap=probe.cap)
    packing = [] if probe.packed is None else [packing_part(code, geometry, layer=0)]
    if rope is not None:
        for i, table in enumerate(turns(rope, sum(probe.pieces), dtype)):
            bench.context[f.TABLES + i] = bench.keep(table)
    for L in probe.pieces:
        offset, history = history.offset, history.extended(L)
        ring = None if ring is None else ring.advanced(L)
        order = np.array([ring.held, ring.index] if ring is not None and L == 1 else [0, 0], np.int64)
        slabs = np.array([address_of(slab.memory) for slab in history.slabs], np.int64)
        size = scratch_floats(
            rows=L, positions=history.offset, group=G, head_blocks=geometry.blocks, columns=geometry.columns
        )
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
        for i, raw in enumerate(_projected(bench, probe, random, L)):
            exact = raw + biases[i].astype(mx.float32) if biases else raw
            x_BLHE = exact.astype(dtype).reshape(1, L, -1, E)
            x_BLHE = mx.fast.rms_norm(x_BLHE, norms[i], 1e-5) if norms and i < 2 else x_BLHE
            x_BHLE = x_BLHE.swapaxes(1, 2)
            heads.append(x_BHLE if rope is None or i == 2 else rope(x_BHLE, offset))
        mask = cache.mask(L, window=probe.window, as_array=probe.cap is not None)
        cache, keys, values = cache.append(heads[1], heads[2])
        expected = _attended(probe, heads[0], keys, values, mask, scale=scale)
        expected = expected.swapaxes(1, 2).reshape(L, -1)
        marked = bench.run(rotation, *packing, attention)
        yield "attention", expected, bench.stored(out), marked
        if packing:
            yield from _packed(history, keys, values, marked=marked)


def _geometry(probe: HeadProbe, dtype: mx.Dtype) -> Geometry:
    columns = shape_of(Form(stored="f32")).columns
    geometry = Geometry(layers=1, groups=probe.groups, width=probe.width, columns=columns, dtype=dtype)
    if probe.packed is None:
        return geometry
    return packed_geometry(geometry, bits=probe.packed[0], group_size=probe.packed[1])


def _empty(probe: HeadProbe) -> tuple[Any, Ring | None]:
    """The cache that is the definition, and the ring beside it."""
    if probe.packed is not None:
        return EmptyQuantizedCache(bits=probe.packed[0], group_size=probe.packed[1]), None
    if probe.window is None or not probe.ring:
        return PlainCache(), None
    return RotatingCache(max_size=probe.window), Ring(max_size=probe.window)


def _packed(history: History, keys: Any, values: Any, *, marked: bool) -> Iterator[Result]:  # noqa: ANN401
    """What the cache that is the definition holds, and what slabs do."""
    for right, found in zip((keys, values), packed_heads(history, 0), strict=True):
        yield "codes", right.weight.view(mx.float32), found.weight.view(mx.float32), marked
        yield "scales", right.scales, found.scales, marked
        yield "biases", right.biases, found.biases, marked


def _places(probe: HeadProbe, biases: list[int]) -> tuple[Place, Place, Place]:
    """Where queries, keys and values stand: in a row of their own each, or all in one."""
    q, k = probe.groups * probe.group * probe.width, probe.groups * probe.width
    if not probe.joined:
        widths = (q, k + SLACK, k)
        made = zip((f.QUERIES, f.KEYS, f.VALUES), widths, biases, strict=True)
        a, b, c = (Place(buffer=word, width=width, bias=bias) for word, width, bias in made)
        return a, b, c
    width = q + 2 * k + SLACK
    a, b, c = (
        Place(buffer=f.QUERIES, width=width, at=at, bias=bias) for at, bias in zip((0, q, q + k), biases, strict=True)
    )
    return a, b, c


def _projected(bench: PartBench, probe: HeadProbe, random: np.random.Generator, L: int) -> list[mx.array]:
    """Sums of queries, keys and values, put where they belong."""
    places, k = _places(probe, [0, 0, 0]), probe.groups * probe.width
    sizes = (k * probe.group, k, k)
    buffers = {place.buffer: drawn(random, probe.special, L, place.width) for place in places}
    for word, raw in buffers.items():
        bench.buffer(word, raw)
    pairs = zip(places, sizes, strict=True)
    return [mx.array(buffers[place.buffer][:, place.at : place.at + size]) for place, size in pairs]


def _attended(probe: HeadProbe, q: mx.array, keys: Any, values: Any, mask: Any, *, scale: float) -> mx.array:  # noqa: ANN401
    """Attention by mlx; where scores are capped before the mask, operation by operation."""
    if probe.cap is None:
        return attend(q, keys, values, scale=scale, mask=mask)
    B, H, L, E = q.shape
    K = keys.shape[1]
    grouped = (q * scale).reshape(B, K, H // K, L, E)
    scores = soft_capped(grouped @ mx.expand_dims(keys, 2).swapaxes(-1, -2), probe.cap)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ mx.expand_dims(values, 2)).reshape(B, H, L, E)


def _rope(probe: HeadProbe) -> Rope | None:
    if probe.rope is None:
        return None
    if probe.rope == "gain":
        scaling = {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16}
        return make_rope(probe.width, base=100.0, scaling=scaling)
    width = probe.width // 2 if probe.rope == "part" else probe.width
    return make_rope(width - width % 2, base=100.0, traditional=probe.rope == "neighbours")
