"""The packed ring against one that another project recorded on an Apple GPU (tests/fixtures/mlx-bun, MIT, see its LICENSE).

Places, tokens seen, scales and biases are exact at every checkpoint. Packed elements are codes of 8 bits; where the quotient
lies at half a code the GPU rounds it otherwise, so a code may differ by one, in few words (measured: 15 to 32 of 1,536 to
2,528). Bits are promised on one platform alone; that bound is of this fixture and no verdict of the gate knows it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.cache import rotating_quantized
from engine.cache.protocol import PackedHeads
from engine.cache.rotating_quantized import RotatingQuantizedCache

FOLDER = Path(__file__).parents[2] / "fixtures" / "mlx-bun" / "rotating-kvq"
MECHANICS = json.loads((FOLDER / "mechanics.json").read_text())
WORDS = np.fromfile(FOLDER / "mechanics.bin", dtype="<u4")
CHECKPOINTS = {int(step): checkpoint for step, checkpoint in MECHANICS["checkpoints"].items()}
DIFFERING = 0.02  # of the words, at most


def stored(tensor: dict[str, Any]) -> npt.NDArray[np.uint32]:
    return WORDS[tensor["offset"] :][: int(np.prod(tensor["shape"]))].reshape(tensor["shape"])


def heads(tensor: dict[str, Any]) -> mx.array:
    return mx.array(stored(tensor)).view(mx.float32).astype(mx.bfloat16)


def played() -> Iterator[tuple[int, RotatingQuantizedCache]]:
    config = MECHANICS["config"]
    cache = RotatingQuantizedCache.empty(
        max_size=config["max_size"], bits=config["bits"], group_size=config["group_size"]
    )
    for step, appended in enumerate(MECHANICS["steps"]):
        cache = cache.append(heads(appended["k"]), heads(appended["v"]))[0]
        yield step, cache


def active(cache: RotatingQuantizedCache, packed: PackedHeads | None) -> PackedHeads:
    assert packed is not None
    used = min(cache.offset, packed.weight.shape[2])
    weight, scales, biases = (part[:, :, :used] for part in (packed.weight, packed.scales, packed.biases))
    return PackedHeads(weight=weight, scales=scales, biases=biases, bits=packed.bits, group_size=packed.group_size)


def widened(array: mx.array) -> npt.NDArray[np.uint32]:
    return np.array(array.astype(mx.float32).view(mx.uint32))


def compare() -> None:
    compared = []
    for step, cache in played():
        if step not in CHECKPOINTS:
            continue
        expected = CHECKPOINTS[step]
        assert (cache.offset, cache.index) == (expected["offset"], expected["idx"])
        for name, packed in (("k", cache.keys), ("v", cache.values)):
            actual = active(cache, packed)
            assert np.array_equal(widened(actual.scales), stored(expected[f"{name}_scales"]))
            assert np.array_equal(widened(actual.biases), stored(expected[f"{name}_biases"]))
            words, recorded = np.array(actual.weight), stored(expected[f"{name}_packed"])
            assert words.shape == recorded.shape
            assert (words != recorded).mean() < DIFFERING
            codes = (np.ascontiguousarray(each).view(np.uint8).astype(int) for each in (words, recorded))
            assert np.abs(np.subtract(*codes)).max() <= 1
        compared.append(step)
    assert compared == [0, 10, 16, 20, 21, 25, 29]


def test_the_recorded_ring_is_ours() -> None:
    compare()


def test_a_ring_that_turns_one_place_off_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rotating_quantized.RotatingCache.append

    def shifted(self: Any, *new: mx.array) -> Any:
        return right(rotating_quantized.replace(self, index=5) if self.index == 4 and self.offset > 64 else self, *new)

    monkeypatch.setattr(rotating_quantized.RotatingCache, "append", shifted)
    with pytest.raises(AssertionError):
        compare()


def test_groups_of_another_size_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MECHANICS["config"], "group_size", 64)
    with pytest.raises(AssertionError):
        compare()
