"""Every word is read, by whichever thread; the figure is bytes over seconds."""

import time

import numpy as np
import pytest

from bench import bandwidth
from bench.bandwidth import read_bandwidth


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_word_is_read_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    true = bandwidth._sum

    def counted(words: bandwidth.Words) -> int:
        read.append(words.size)
        return int(true(words))

    monkeypatch.setattr(bandwidth, "_sum", counted)
    assert read_bandwidth(threads, 1) > 0
    assert (len(read), sum(read)) == (threads, 2**20 // 8)


def test_a_word_that_is_not_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_sum", lambda words: int(words[1:].sum()))
    with pytest.raises(RuntimeError, match="131070 of 131072 words were read"):
        read_bandwidth(2, 1)


def test_the_rate_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 1.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(bandwidth, "_sum", lambda words: int(np.sum(words)))
    assert read_bandwidth(1, 1) == 2**21
