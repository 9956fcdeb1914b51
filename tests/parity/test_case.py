import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.case import KV, Case, Feed
from parity.errors import CaseError
from parity.kv import KV_BITS, KV_GROUPS

FEEDS = st.sampled_from([Feed(mode="whole"), Feed(mode="tail-split")]) | st.builds(
    lambda n: Feed(mode="chunked", chunk=n), st.integers(1, 10_000)
)
KVS = st.just(KV()) | st.builds(
    lambda b, g, s: KV(bits=b, group_size=g, start=s),
    st.sampled_from(KV_BITS),
    st.sampled_from(KV_GROUPS),
    st.integers(0, 10_000),
)
IDS = st.integers(0, 2**31 - 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_steps = draw(st.integers(1, 5))
    forced = draw(st.none() | st.lists(IDS, min_size=num_steps, max_size=num_steps).map(tuple))
    return Case(
        name=draw(st.text(max_size=20)),
        snapshot=draw(st.text(max_size=20)),
        dtype=draw(st.sampled_from(["f32", "bf16", "f16"])),
        prompt_ids=tuple(draw(st.lists(IDS, min_size=1, max_size=5))),
        forced_ids=forced,
        feed=draw(FEEDS),
        kv=draw(KVS),
        num_steps=num_steps,
        tier=draw(st.sampled_from(["L1", "L2", "L3"])),
        oracle=draw(st.text(max_size=20)),
        record=tuple(draw(st.lists(st.text(max_size=8), max_size=3))),
    )


@given(cases())
def test_a_case_is_equal_after_a_round_trip_through_json(case: Case) -> None:
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


@given(FEEDS)
def test_a_feed_reads_what_it_writes(feed: Feed) -> None:
    assert Feed.parse(feed.name) == feed


@given(KVS)
def test_a_kv_mode_reads_what_it_writes(kv: KV) -> None:
    assert KV.parse(kv.name) == kv


@pytest.mark.parametrize("name", ["", "chunk", "chunk0", "chunk-3", "Whole", "chunk5 "])
def test_an_unknown_feed_is_refused_by_name(name: str) -> None:
    with pytest.raises(CaseError, match=r"unknown feed '.*'\n  known  whole, tail-split, chunkN"):
        Feed.parse(name)


@pytest.mark.parametrize("name", ["", "kv8", "kv7-g64", "kv8-g48", "kv8-g64-s", "fp16"])
def test_an_unknown_kv_mode_is_refused_by_name(name: str) -> None:
    with pytest.raises(CaseError, match="unknown KV mode"):
        KV.parse(name)


@pytest.mark.parametrize(("mode", "chunk"), [("whole", 3), ("chunked", None), ("tail-split", 1), ("twice", None)])
def test_a_chunk_belongs_to_chunked_feeds_alone(mode: Any, chunk: int | None) -> None:
    with pytest.raises(CaseError, match="unknown feed"):
        Feed(mode=mode, chunk=chunk)


@pytest.mark.parametrize("fields", [{"prompt_ids": ()}, {"num_steps": 0}])
def test_a_case_that_asks_for_nothing_is_refused(make_case: Callable[..., Case], fields: dict[str, Any]) -> None:
    with pytest.raises(CaseError, match="asks for nothing"):
        make_case(**fields)


@pytest.mark.parametrize("forced", [(), (1, 2), (1, 2, 3, 4)])
def test_forced_ids_are_as_many_as_steps(make_case: Callable[..., Case], forced: tuple[int, ...]) -> None:
    with pytest.raises(CaseError, match="does not force one token a step"):
        make_case(forced_ids=forced)


@pytest.mark.parametrize("key", ["name", "prompt_ids", "feed", "record"])
def test_a_missing_field_is_refused_by_name(make_case: Callable[..., Case], key: str) -> None:
    raw = make_case().to_json()
    del raw[key]

    with pytest.raises(CaseError, match=rf"not a case of this version[\s\S]*{key}"):
        Case.from_json(raw)


def test_an_unknown_field_is_refused_by_name(make_case: Callable[..., Case]) -> None:
    with pytest.raises(CaseError, match=r"not a case of this version[\s\S]*temperature"):
        Case.from_json({**make_case().to_json(), "temperature": 1})


def test_tiles_in_float32_are_refused_unless_lifted(make_case: Callable[..., Case]) -> None:
    with pytest.raises(CaseError) as caught:
        make_case(kv=KV.parse("kv8-g64-tiled512"))
    assert str(caught.value) == (
        "case toy/f32/fp/greedy/p3-whole asks for tiles in float32, which the oracle silently leaves out\n"
        "  kv    kv8-g64-tiled512\n"
        "  next  use bf16 or f16, or kv8-g64-tiled512-lifted"
    )
    assert make_case(kv=KV.parse("kv8-g64-tiled512"), dtype="bf16").kv.tile == 512
    assert make_case(kv=KV.parse("kv8-g64-tiled512-lifted")).kv.lifted
