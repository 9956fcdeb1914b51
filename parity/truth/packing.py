"""Packed keys and values in float64: which rows of a run attend to them, and what packing does to a group of elements.

A row attends to packed keys and values, its own among them, where its forward began on a cache that was packed; else to all of
them as computed. So one forward over all ids holds a run in pieces: each row chooses. Packing rounds to a few codes: near the
middle between two codes the rounding of a dtype decides, and the bound grows by a step of the code, as it does in honest runs.

Source: spec/kv.md section 3 (the affine code of a group); spec/generate.md section 1 (when conversion happens).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parity.case import Case
from parity.truth.rounding import Rounding
from parity.truth.weights import Array, NoTruthError

LEAST: float = 1e-7  # of a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a run packs.

    Attributes:
        bits: Width of a code.
        group_size: Elements of a head that share a scale and a bias.
        first: Rows from this one on attend to packed keys and values.
    """

    bits: int
    group_size: int
    first: int

    def rows(self, length: int) -> npt.NDArray[np.bool_]:
        """Whether each of `length` rows attends to packed keys and values."""
        return np.arange(length) >= self.first

    def __call__(self, heads: Array, rounding: Rounding) -> Array:
        """What is read back of heads [..., E]."""
        top = 2**self.bits - 1
        groups = heads.reshape(*heads.shape[:-1], -1, self.group_size)
        low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
        below = np.abs(low) > np.abs(high)
        edge = np.where(below, low, high)
        scale = np.maximum((high - low) / top, LEAST) * np.where(below, 1.0, -1.0)
        codes_at_edge = np.rint(edge / scale)
        scale = np.where(codes_at_edge == 0, scale, edge / np.where(codes_at_edge == 0, 1.0, codes_at_edge))
        bias = np.where(codes_at_edge == 0, 0.0, edge)
        codes = np.clip(np.rint(rounding.code((groups - bias) / scale)), 0, top)
        return np.asarray((codes * scale + bias).reshape(heads.shape))


def packing_of(case: Case) -> Packing | None:
    """How a case packs; None where it keeps keys and values as computed.

    Raises:
        NoTruthError: It packs in a way that is not written here.
    """
    kv = case.kv
    if kv.max_size is not None:
        raise NoTruthError("the truth keeps every position, and this KV mode has rings")
    if not kv.packs:
        return None
    if kv.bits is None or kv.tile is not None or case.dtype != "f32":
        raise NoTruthError(f"the KV mode {kv.name} in {case.dtype} has no float64 truth")
    if kv.order == "from-empty":
        return Packing(bits=kv.bits, group_size=kv.group_size, first=0)
    begins = _forward_begins(case)
    if kv.order == "after-prompt":
        begins = [begin for begin in begins if begin >= len(case.prompt_ids)]
    first = next((begin for begin in begins if begin >= max(kv.start, 1)), len(case.prompt_ids) + case.num_steps)
    return Packing(bits=kv.bits, group_size=kv.group_size, first=first)


def _forward_begins(case: Case) -> list[int]:
    """Positions at which forwards begin."""
    length = len(case.prompt_ids)
    pieces = [0]
    if case.feed.mode != "whole" and length > 1:
        pieces = [*range(0, length - 1, case.feed.chunk or length), length - 1]
    return pieces + [length + step for step in range(case.num_steps)]
