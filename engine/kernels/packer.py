"""Packed histories of a fused model: their geometries, the parts of a forward over them, and the packing of a plain one.

Guarantees: a model has one geometry for each width, so that histories of one width are known to be alike. A history is packed
only where that gives finite values alone; one that is packed is a new history in new memory, and the plain one stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from engine.cache.protocol import Cache
from engine.cache.quantized import EmptyQuantizedCache
from engine.kernels import fields as f
from engine.kernels.blocks import address_of
from engine.kernels.driver import NAN, SLOTS
from engine.kernels.history import Geometry, History, Slab, aligned
from engine.kernels.layout import NAMES
from engine.kernels.memory import entry
from engine.kernels.part_words import Words, packing_part, words_of
from engine.kernels.program import Program
from engine.kernels.step import StepCode
from engine.kernels.team import Team
from engine.kernels.tile import STORED
from engine.quantization import AFFINE_GROUPS

WORTH_A_THREAD: Final = 64  # positions of a layer


def packed_geometry(plain: Geometry, *, bits: int, group_size: int) -> Geometry:
    """The same slabs with room for codes."""
    return replace(plain, bits=bits, group_size=group_size, base=plain)


def packed_copy(history: History, geometry: Geometry, code: StepCode, team: Team) -> History | None:
    """A plain history packed; None where something in it, or what it is packed to, is not finite."""
    slabs = []
    for i, slab in enumerate(history.slabs):
        memory = aligned(geometry.floats)
        memory[: geometry.scales_at] = slab.memory
        slabs.append(Slab(memory=memory, filled=min(f.SLAB, history.offset - i * f.SLAB)))
    parts = np.array(
        [words_of(packing_part(code, geometry, layer=layer)) for layer in range(geometry.layers)], np.int64
    )
    addresses = np.array([address_of(slab.memory) for slab in slabs], np.int64)
    size = geometry.blocks * geometry.columns
    scratch = aligned(size * team.threads)
    context, control = np.zeros(f.CONTEXT_WORDS, np.int64), np.zeros((len(parts), SLOTS), np.int64)
    for word, value in (
        (f.ROWS, history.offset),
        (f.ROUNDING, STORED.index(NAMES[geometry.dtype])),
        (f.SLABS, address_of(addresses)),
        (f.SCRATCH, address_of(scratch)),
        (f.SCRATCH_SIZE, 4 * size),
    ):
        context[word] = value
    held = (parts, addresses, scratch, context, control, slabs)

    def work(_control: int, _held: object = held) -> int:  # holds what any thread may touch
        return int(code.run(address_of(parts), len(parts), address_of(context), address_of(control)))

    threads = max(1, min(team.threads, history.offset // WORTH_A_THREAD))
    team.run(work, len(parts), threads=threads)
    if control[:, NAN].any():
        return None
    return replace(history, geometry=geometry, slabs=tuple(slabs), pack=None)


@dataclass(slots=True, kw_only=True, eq=False)
class Packer:
    """What a fused model has for packed keys and values.

    Attributes:
        program: The model's, over plain ones.
        team: Threads.
        refusal: Why it has nothing; None where it has.
    """

    program: Program
    team: Team
    refusal: str | None = None
    _kinds: dict[tuple[int, int], tuple[Geometry, Words]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.program.rings:
            self.refusal = "packed rings"

    @property
    def smallest_group(self) -> int | None:
        """Elements of a head that may share a scale, at least; None where nothing is packed."""
        width = self.program.geometry.width
        return None if self.refusal else next((size for size in AFFINE_GROUPS if width % size == 0), None)

    def history(self, caches: Sequence[Cache]) -> History | None:
        """An empty packed history in the place of empty packed caches that are all alike; None where there is none."""
        kinds = {
            (cache.bits, cache.group_size, cache.tiling) if type(cache) is EmptyQuantizedCache else None
            for cache in caches
        }
        kind = next(iter(kinds))
        if len(kinds) != 1 or kind is None or kind[2] is not None:
            return None
        geometry = self.geometry(*kind[:2])
        return None if geometry is None else History(geometry=geometry)

    def geometry(self, bits: int, group_size: int) -> Geometry | None:
        """Of packed slabs; None where the fused step does not attend to such."""
        if self.refusal is not None or self.program.geometry.width % group_size:
            return None
        if (bits, group_size) not in self._kinds:
            geometry = packed_geometry(self.program.geometry, bits=bits, group_size=group_size)
            self._kinds[bits, group_size] = geometry, _packing_parts(self.program, geometry)
        return self._kinds[bits, group_size][0]

    def parts(self, geometry: Geometry) -> Words:
        """The parts of a forward over slabs of a geometry."""
        if not geometry.bits:
            return self.program.parts
        return self._kinds[geometry.bits, geometry.group_size][1]

    def packed(self, history: History, bits: int, group_size: int) -> History | None:
        """A plain history packed; None where it cannot be, or not here."""
        geometry = self.geometry(bits, group_size)
        return None if geometry is None else packed_copy(history, geometry, self.program.code, self.team)


def _packing_parts(program: Program, geometry: Geometry) -> Words:
    """The parts of a program with one that packs after each one that stores, and attention that rounds as packed heads want."""
    code, rows, layer = program.code, [], 0
    for part in program.parts:
        rows.append(part.copy())
        if part[f.KIND] == f.PRODUCT:
            continue
        if part[f.CODE] == entry(code.rotation):
            rows.append(words_of(packing_part(code, geometry, layer=layer)))
            layer += 1
        elif part[f.CODE] == entry(code.attention):
            rows[-1][f.CODE] = entry(code.packed_attention[program.rounding])
    return np.array(rows, np.int64)
