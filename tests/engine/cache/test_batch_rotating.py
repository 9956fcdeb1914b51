"""The batch of rotating caches: a foreign recording, and whatever happens to it, each row sees its own window."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.batch_rotating import BatchRotatingCache
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError
from tests.engine.cache.tagged_rows import JUNK, History, happenings, heads, seen, tags

RECORDING = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "mlx-bun" / "batched-rotating" / "golden.json").read_text()
)
WINDOW = 6


def single(row: list[float], *, pieces: int = 4, max_size: int = WINDOW) -> RotatingCache:
    """A sequence's cache after its tokens came in pieces, so that rings of all shapes take part."""
    cache = RotatingCache(max_size=max_size)
    for start in range(0, len(row), pieces):
        cache = cache.append(*heads([row[start : start + pieces]]))[0]
    return cache


@pytest.mark.parametrize("step", range(RECORDING["steps"]))
def test_masks_and_extracted_rows_are_those_of_a_foreign_recording(step: int) -> None:
    max_size = RECORDING["max_size"]
    cache = BatchRotatingCache.merged(
        [single(keys, pieces=len(keys), max_size=max_size) for keys in RECORDING["prefill_keys"]]
    )
    for at in range(step + 1):
        mask = cache.mask(1)
        assert isinstance(mask, mx.array)
        cache, _, _ = cache.append(*heads([[keys[at]] for keys in RECORDING["decode_keys"]]))
    expected = RECORDING["per_step"][step]
    assert np.array(mask).astype(int).tolist() == expected["mask"]
    assert [tags(cache.extract(row).keys) for row in range(RECORDING["B"])] == expected["extracted"]


@given(
    lengths=st.lists(st.integers(0, 15), min_size=1, max_size=4),
    happenings=happenings,
    pieces=st.sampled_from([1, 4, 20]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_each_row_sees_its_own_window(
    lengths: list[int], happenings: list[tuple[str, int]], pieces: int
) -> None:
    history = History(
        lengths,
        merged=BatchRotatingCache.merged,
        single=lambda row: single(list(row), pieces=pieces),
        window=WINDOW,
    )
    for what, number in happenings:
        history.happen(what, number)


def test_several_columns_after_a_ring_came_round_hide_no_token() -> None:
    history = History([0, 6], merged=BatchRotatingCache.merged, single=lambda row: single(list(row)), window=WINDOW)
    history.happen("step", 1)
    assert history.cache.rotated
    history.happen("step", 2)
    history.happen("uneven", 1)


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=3), happenings=happenings)
@settings(max_examples=20, deadline=None)
def test_a_window_smaller_than_the_ring_is_kept_to(lengths: list[int], happenings: list[tuple[str, int]]) -> None:
    cache = BatchRotatingCache.merged([single(list(range(length))) for length in lengths])
    rows = [[float(tag) for tag in range(length)] for length in lengths]
    for _, number in happenings:
        new = [float(number)] * len(rows)
        cache, shown = seen(cache, [[tag] for tag in new], window=3)  # type: ignore[assignment]
        rows = [[*row, tag] for row, tag in zip(rows, new, strict=True)]
        assert shown == [[sorted(row[-3:])] for row in rows]


def test_left_padding_of_an_empty_batch_is_hidden_until_it_has_rotated_out() -> None:
    cache = BatchRotatingCache.empty(4, [0, 2])
    longer, shown = seen(cache, [[1.0, 2.0, 3.0], [JUNK, JUNK, 5.0]])
    assert [row[2] for row in shown] == [[1.0, 2.0, 3.0], [5.0]]
    for tag, expected in (
        (6.0, [5.0, 6.0]),
        (7.0, [5.0, 6.0, 7.0]),
        (8.0, [5.0, 6.0, 7.0, 8.0]),
        (9.0, [6.0, 7.0, 8.0, 9.0]),
    ):
        longer, shown = seen(longer, [[tag], [tag]])
        assert shown[1] == [expected]
    assert isinstance(longer, BatchRotatingCache)
    assert longer.padding[1] < 0
    assert longer.row_offsets == (7, 5)


def test_a_row_that_came_round_alone_joins_with_what_it_still_sees() -> None:
    old = single([float(tag) for tag in range(20)], pieces=1)
    cache = BatchRotatingCache.merged([old, single([50.0, 51.0])])
    assert cache.row_offsets == (20, 2)
    _, shown = seen(cache, [[20.0], [52.0]])
    assert shown == [[[15.0, 16.0, 17.0, 18.0, 19.0, 20.0]], [[50.0, 51.0, 52.0]]]


def test_rings_of_two_windows_or_with_kept_positions_are_refused() -> None:
    for rows in (
        [RotatingCache(max_size=6), RotatingCache(max_size=8)],
        [RotatingCache(max_size=6, keep=2), RotatingCache(max_size=6, keep=2)],
    ):
        with pytest.raises(RequestError) as caught:
            BatchRotatingCache.merged(rows)
        kinds = ", ".join(sorted({row.kind for row in rows}))
        assert str(caught.value) == (
            "rotating caches cannot share a batch\n"
            f"  kinds  {kinds}\n"
            "  next   batch sequences of one window, with no first positions kept"
        )
    with pytest.raises(RequestError, match="caches of different kinds cannot share a batch"):
        BatchRotatingCache.empty(6, [0]).extend(BatchRotatingCache.empty(8, [0]))


def test_it_is_a_value() -> None:
    start = BatchRotatingCache.merged([single([float(tag) for tag in range(9)]), single([30.0])])
    one, two = start.append(*heads([[40.0], [41.0]]))[0], start.append(*heads([[50.0], [51.0]]))[0]
    assert [tags(cache.extract(1).keys)[-1] for cache in (start, one, two)] == [30.0, 41.0, 51.0]
    assert [cache.row_offsets for cache in (start, one)] == [(9, 1), (10, 2)]


def test_a_ring_that_came_round_cannot_be_trimmed() -> None:
    cache = BatchRotatingCache.merged([single([1.0, 2.0]), single([float(tag) for tag in range(9)])])
    assert not cache.trimmable
    with pytest.raises(RequestError) as caught:
        cache.trim(1)
    assert str(caught.value) == (
        "the cache cannot forget its last tokens\n"
        "  kind    batch-rotating-w6\n"
        "  tokens  1\n"
        "  reason  what they replaced is gone\n"
        "  next    keep the cache as it was before them, or compute it again"
    )


def test_right_padding_is_announced_for_one_append() -> None:
    cache = BatchRotatingCache.empty(6, [0, 0]).prepare([3, 1])
    with pytest.raises(ValueError, match="one append, then finalize"):
        cache.append(*heads([[1.0, 2.0], [3.0, JUNK]]))
    with pytest.raises(ValueError, match="finalize"):
        cache.extend(cache)
    with pytest.raises(ValueError, match="lengths"):
        cache.prepare([3])


def test_a_planted_mask_that_does_not_rotate_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cache.batch_rotating.mx.roll", lambda array, *_: array)
    history = History([7, 2], merged=BatchRotatingCache.merged, single=lambda row: single(list(row)), window=WINDOW)
    with pytest.raises(AssertionError):
        history.happen("step", 1)
