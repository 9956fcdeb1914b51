"""Memory for weights: arrays side by side in large chunks, which the machine maps by large pages where it can.

A decode step reads every weight once, and a matrix of its own allocation is too small for a large page: the processor then
looks up an address every 4 KiB, and what it fetches in advance ends there.

Guarantees: arrays begin on a line of the processor's cache and never overlap. A chunk lives as long as one of its arrays.
"""

import ctypes
import mmap
import threading
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LINE: Final = 64  # bytes of a line of the processor's cache
CHUNK: Final = 16 * 2**20  # bytes, a multiple of PAGE; larger arrays have a chunk of their own
PAGE: Final = 2 * 2**20  # bytes of a large page


class Arena:
    """Hands out memory; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A new array, not initialised."""
        kind = np.dtype(dtype)
        size = prod(shape) * kind.itemsize
        with self._lock:
            if self._used + size > self._chunk.nbytes:
                chunk = _chunk(size)
                if size > CHUNK // 2:
                    return chunk[:size].view(kind).reshape(shape)
                self._chunk, self._used = chunk, 0
            start = self._used
            self._used += -(-size // LINE) * LINE
            return self._chunk[start : start + size].view(kind).reshape(shape)


def _chunk(size: int) -> npt.NDArray[np.uint8]:
    """At least CHUNK bytes that begin on a large page."""
    wanted = max(CHUNK, -(-size // PAGE) * PAGE)
    memory = mmap.mmap(-1, wanted + PAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, wanted, first)


WEIGHTS: Final = Arena()
