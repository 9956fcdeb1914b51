from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parity.case import Case, Feed
from parity.kv import KV, LayerWidth
from parity.truth.packing import Packing, packing_of
from parity.truth.rounding import Exact
from parity.truth.weights import NoTruthError


def case_of(kv: str, feed: Feed | None = None, **fields: Any) -> Case:
    given: dict[str, Any] = {"prompt_ids": tuple(range(20)), "forced_ids": (1, 2, 3), "num_steps": 3, "dtype": "f32"}
    return Case(name="x", snapshot="x", feed=feed or Feed(mode="tail-split"), kv=KV.parse(kv), **{**given, **fields})


@pytest.mark.parametrize(
    ("kv", "feed", "first"),
    [
        ("kv8-g64", Feed(mode="tail-split"), 19),
        ("kv8-g64", Feed(mode="whole"), 20),
        ("kv8-g64", Feed(mode="chunked", chunk=6), 6),
        ("kv8-g64-s7", Feed(mode="chunked", chunk=6), 12),
        ("kv8-g64-s21", Feed(mode="whole"), 21),
        ("kv8-g64-after-prompt", Feed(mode="chunked", chunk=6), 20),
        ("kv8-g64-from-empty", Feed(mode="whole"), 0),
        ("kv8-g64-s99", Feed(mode="whole"), 23),
    ],
)
def test_a_row_is_packed_where_its_forward_began_on_a_packed_cache(kv: str, feed: Feed, first: int) -> None:
    packing = packing_of(case_of(kv, feed))
    assert packing is not None
    assert packing.first == first
    assert packing.rows(22).tolist() == [row >= first for row in range(22)]


def test_nothing_is_packed_where_nothing_is_asked_for() -> None:
    assert packing_of(case_of("fp")) is None


@pytest.mark.parametrize(
    ("kv", "dtype", "message"),
    [
        (KV(max_size=16), "f32", "the truth keeps every position, and this KV mode has rings"),
        (KV(layers=(LayerWidth(cache=0, bits=8),)), "f32", "the KV mode {} in f32 has no float64 truth"),
        (KV(bits=8), "bf16", "the KV mode {} in bf16 has no float64 truth"),
    ],
)
def test_other_modes_are_refused(kv: KV, dtype: Any, message: str) -> None:
    with pytest.raises(NoTruthError) as caught:
        packing_of(replace(case_of("fp"), kv=kv, dtype=dtype))
    assert str(caught.value) == message.format(kv.name)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_group_keeps_its_outermost_element_and_the_others_to_half_a_step(bits: int) -> None:
    heads = np.random.default_rng(bits).normal(size=(3, 2, 64))
    back = Packing(bits=bits, group_size=32, first=0)(heads, Exact())
    groups, read = heads.reshape(3, 2, 2, 32), back.reshape(3, 2, 2, 32)
    step = (groups.max(-1) - groups.min(-1)) / (2**bits - 1)
    edge = np.abs(groups).argmax(-1)[..., None]
    assert np.allclose(np.take_along_axis(read, edge, -1), np.take_along_axis(groups, edge, -1), rtol=0, atol=1e-12)
    assert (np.abs(read - groups) <= step[..., None]).all()
    assert len({len(np.unique(row)) for row in read.reshape(-1, 32)} - set(range(1, 2**bits + 1))) == 0
