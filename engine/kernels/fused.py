"""A model whose forward is one compiled call a thread, beside the same model on plain operations and fast products.

Guarantees: the fused step is taken for one sequence on caches of its own (`fast_caches`), plain ones or ones that are all
packed alike; for batches, for caches of another kind (packed rings, tiles, several widths), while somebody watches, and where a
NaN or an infinite value turns up, the model on fast products computes the call, on caches that hold the same bits. Which call
goes where is decided by its arguments and values alone.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, settled
from engine.cache.rotating import RotatingCache
from engine.kernels import fields as f
from engine.kernels.blocks import address_of
from engine.kernels.driver import NAN, SLOTS
from engine.kernels.history import Floats, FusedCache, History, Ring, aligned
from engine.kernels.packer import Packer
from engine.kernels.part_words import floats
from engine.kernels.plan import Plan
from engine.kernels.program import Program
from engine.kernels.step import Step
from engine.kernels.team import Team
from engine.model import CausalModel
from engine.rope import Rope
from engine.taps import is_watched

WORTH_A_THREAD: Final = 2_000_000  # products of numbers


@dataclass(slots=True, kw_only=True, eq=False)
class FusedModel:
    """A `CausalModel`.

    Attributes:
        linear: The same model with fast products alone.
        plan: What its forward is.
        program: The same, compiled.
        run: The compiled step.
        team: Threads.
    """

    linear: CausalModel
    plan: Plan
    program: Program
    run: Step
    team: Team
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _buffers: dict[int, Floats] = field(default_factory=dict)
    _rows: int = 0
    _scratch: Floats = field(default_factory=lambda: aligned(0))
    _tables: list[tuple[Floats, Floats]] = field(default_factory=list)
    _positions: int = 0
    _packer: Packer = field(init=False)

    def __post_init__(self) -> None:
        self._packer = Packer(program=self.program, team=self.team)

    @property
    def vocabulary(self) -> int:
        """Ids are below it."""
        return self.linear.vocabulary

    @property
    def head_width(self) -> int:
        """Elements of a key or value head."""
        return self.linear.head_width

    @property
    def no_packed_kv(self) -> str | None:
        """Why keys and values cannot be packed; None where they can."""
        return self.linear.no_packed_kv

    @property
    def packs_by(self) -> int | None:
        """The smallest group of elements by which the fused step packs keys and values; None where it does not."""
        return None if self.no_packed_kv else self._packer.smallest_group

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty caches for a new sequence."""
        return self.linear.make_caches()

    def logits(self, hidden_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states."""
        return self.linear.logits(hidden_BLD)

    def hidden(self, ids_BL: mx.array, caches: Sequence[Cache]) -> tuple[mx.array, tuple[Cache, ...]]:
        """Hidden states [B, L, D] after the final norm, and the longer caches."""
        held = None if is_watched() or ids_BL.shape[0] != 1 or ids_BL.size == 0 else self._held(caches)
        if held is not None:
            history, rings = held
            L = ids_BL.shape[1]
            with self._lock:
                rows, longer = self._forward(ids_BL, history, rings)
            if rows is not None:
                new = {layer: ring.advanced(L) for layer, ring in rings.items()}
                return mx.array(rows[None]).astype(self.plan.dtype), tuple(
                    FusedCache(history=longer, layer=i, ring=new.get(i)) for i in range(len(self.plan.layers))
                )
        return self.linear.hidden(ids_BL, settled(caches))

    def fast_caches(self, caches: Sequence[Cache]) -> tuple[Cache, ...]:
        """Caches of the fused step in the place of the empty ones that the family makes; any others as they are."""
        windows = self.program.rings
        if (packed := self._packer.history(caches)) is not None:
            return tuple(FusedCache(history=packed, layer=i) for i in range(len(caches)))
        if not all(is_empty(cache, windows.get(i)) for i, cache in enumerate(caches)):
            return tuple(caches)
        history = History(geometry=self.program.geometry, pack=self._packer.packed)
        return tuple(
            FusedCache(history=history, layer=i, ring=Ring(max_size=windows[i]) if i in windows else None)
            for i in range(len(caches))
        )

    def _held(self, caches: Sequence[Cache]) -> tuple[History, dict[int, Ring]] | None:
        """The history that caches stand for; None where they are not this model's fused ones, all of one place."""
        first, rings = caches[0], dict[int, Ring]()
        if not isinstance(first, FusedCache):
            return None
        geometry = first.history.geometry
        if (geometry.base or geometry) is not self.program.geometry:
            return None
        for i, cache in enumerate(caches):
            if not isinstance(cache, FusedCache) or cache.layer != i or not cache.history.is_same(first.history):
                return None
            if cache.ring is not None:
                rings[i] = cache.ring
        return first.history, rings

    def _forward(self, ids_BL: mx.array, history: History, rings: dict[int, Ring]) -> tuple[Floats | None, History]:
        """Hidden states [L, D]; None where the call is mlx's. And the longer history."""
        x = np.asarray(self.plan.embed(ids_BL).astype(mx.float32))[0]
        L, longer = len(x), history.extended(len(x))
        self._make_room(min(L, f.MOST_ROWS), longer.offset)
        out = np.empty((L, self.plan.width), np.float32)
        orders = np.zeros((len(self.plan.layers), 2), np.int64)
        if L == 1:
            for layer, ring in rings.items():
                new = ring.advanced(1)
                orders[layer] = new.held, new.index
        slabs = np.array([address_of(slab.memory) for slab in longer.slabs], np.int64)
        for start in range(0, L, f.MOST_ROWS):
            rows = x[start : start + f.MOST_ROWS]
            count = len(rows)
            self._buffers[f.STREAM][: rows.size] = rows.reshape(-1)
            if not self._step(count, history.offset + start, slabs, orders, longer):
                return None, longer
            out[start : start + count] = self._buffers[f.NORMED][: rows.size].reshape(rows.shape)
        return out, longer

    def _step(self, rows: int, offset: int, slabs: Any, orders: Any, history: History) -> bool:  # noqa: ANN401
        parts = self._packer.parts(history.geometry)
        context = np.zeros(f.CONTEXT_WORDS, np.int64)
        control = np.zeros((len(parts), SLOTS), np.int64)
        threads = max(1, min(self.team.threads, rows * self.program.cost // WORTH_A_THREAD))
        size = self.program.scratch(rows, offset + rows)
        if self._scratch.size < size * self.team.threads:
            self._scratch = aligned(2 * size * self.team.threads)
        for word, value in (
            (f.ROWS, rows),
            (f.OFFSET, offset),
            (f.ROUNDING, self.program.rounding),
            (f.SLABS, address_of(slabs)),
            (f.RINGS, address_of(orders)),
            (f.SCRATCH, address_of(self._scratch)),
            (f.SCRATCH_SIZE, 4 * size),
        ):
            context[word] = value
        for word, buffer in self._buffers.items():
            context[word] = address_of(buffer)
        for i, pair in enumerate(self._tables):
            context[f.TABLES + 2 * i : f.TABLES + 2 * i + 2] = [address_of(table) for table in pair]
        held = (parts, slabs, orders, history, self._scratch, tuple(self._buffers.values()), tuple(self._tables))

        def work(_control: int, _held: object = held) -> int:  # holds what any thread may touch
            return self.run(address_of(parts), len(parts), address_of(context), address_of(control))

        self.team.run(work, len(parts), threads=threads)
        return not control[:, NAN].any()

    def _make_room(self, rows: int, positions: int) -> None:
        if rows > self._rows:
            self._rows = rows
            self._buffers = {word: aligned(rows * width) for word, width in self.program.widths.items()}
        if positions > self._positions:
            self._positions = max(512, 2 * positions)
            self._tables = [turns(rope, self._positions, self.plan.dtype) for rope in self.program.ropes]


def is_empty(cache: Cache, window: int | None) -> bool:
    """Whether a cache is what a family makes for a new sequence."""
    if cache.arrays or cache.offset:
        return False
    if window is None:
        return type(cache) is PlainCache
    return type(cache) is RotatingCache and (cache.max_size, cache.keep) == (window, 0)


def turns(rope: Rope, positions: int, dtype: mx.Dtype) -> tuple[Floats, Floats]:
    """Cosines and sines [positions, width / 2] as the rotation itself has them: it turns (1, 0) into both."""
    half = rope.width // 2
    one, zero = mx.ones((1, 1, positions, half), dtype), mx.zeros((1, 1, positions, half), dtype)
    bare = replace(rope, gain=1.0, traditional=False)
    turned = bare(mx.concatenate([one, zero], axis=-1), 0)[0, 0]
    return floats(turned[:, :half]), floats(turned[:, half:])
