# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""How fast this machine reads memory: the limit of a decode step, which reads every weight once.

Each thread sums its own stretch of an array that is larger than any cache. Sums of integers, eight at a time, so that adding is
never what takes the time.
"""

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Words = npt.NDArray[np.uint64]


@njit("uint64(uint64[::1])", nogil=True, cache=False)
def _sum(words):  # noqa: ANN001, ANN202 - Numba's
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


def read_bandwidth(threads: int, mib: int) -> float:
    """Bytes a second that `threads` threads read together.

    Args:
        threads: At least 1.
        mib: Size of what is read, once by all of them together.
    """
    words = np.ones(mib * 2**20 // 8, np.uint64)
    parts = np.array_split(words, threads)
    sums: list[Any] = [0] * threads
    ready = threading.Barrier(threads + 1)

    def read(index: int) -> None:
        ready.wait()
        sums[index] = int(_sum(parts[index]))

    started = [threading.Thread(target=read, args=(index,)) for index in range(threads)]
    for thread in started:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in started:
        thread.join()
    seconds = time.perf_counter() - start
    if sum(sums) != words.size:
        raise RuntimeError(f"{sum(sums)} of {words.size} words were read")
    return words.nbytes / seconds
