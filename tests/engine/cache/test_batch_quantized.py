"""The batch of quantised caches: the packed bits of each row are those of the row alone, whatever happens to the batch."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.batch_plain import BatchPlainCache
from engine.cache.batch_quantized import BatchQuantizedCache
from engine.cache.plain import PlainCache
from engine.cache.protocol import PackedHeads
from engine.cache.quantized import EmptyQuantizedCache, QuantizedCache
from engine.errors import RequestError
from engine.quantization import AFFINE_BITS, AFFINE_GROUPS
from tests.engine.cache.tagged_rows import happenings

Check = Callable[..., None]
Normal = Callable[..., mx.array]
Single = QuantizedCache | EmptyQuantizedCache
EMPTY = EmptyQuantizedCache(bits=4, group_size=32)


def parts(heads: PackedHeads) -> tuple[mx.array, ...]:
    return heads.weight, heads.scales, heads.biases


def single(heads_1KTE: mx.array, empty: EmptyQuantizedCache = EMPTY) -> Single:
    return empty.append(heads_1KTE, -heads_1KTE)[0] if heads_1KTE.shape[2] else empty


class Both:
    """A quantised batch beside a plain one of the same tokens, and the rows that both must hold."""

    def __init__(self, normal: Normal, same_bits: Check, lengths: Sequence[int]) -> None:
        self._normal, self._same_bits, self._seed = normal, same_bits, 0
        self.rows = [self.new(length) for length in lengths]
        self.packed = BatchQuantizedCache.merged([single(row) for row in self.rows])

    def new(self, length: int) -> mx.array:
        self._seed += 1
        return self._normal(self._seed, (1, 2, length, 32))

    def happen(self, what: str, number: int) -> None:
        getattr(self, what)(number)
        assert self.packed.row_offsets == tuple(row.shape[2] for row in self.rows)
        plain = BatchPlainCache.merged(
            [PlainCache().append(row, row)[0] if row.size else PlainCache() for row in self.rows]
        )
        for row, own in enumerate(self.rows):
            alone, expected = self.packed.extract(row), single(own)
            assert alone.offset == plain.row_offsets[row] == expected.offset
            if not isinstance(alone, QuantizedCache) or not isinstance(expected, QuantizedCache):
                continue
            for kept, whole in ((alone.keys, expected.keys), (alone.values, expected.values)):
                for one, two in zip(parts(whole), parts(kept), strict=True):
                    self._same_bits(one[:, :, : own.shape[2]], two)

    def step(self, length: int) -> None:
        new = mx.concatenate([self.new(length) for _ in self.rows])
        mask = self.packed.mask(length)
        self.packed, keys, values = self.packed.append(new, -new)
        assert isinstance(mask, mx.array)
        assert mask.shape == (len(self.rows), 1, length, keys.weight.shape[2])
        assert keys.weight.shape[:3] == values.weight.shape[:3] == (len(self.rows), 2, self.packed.offset)
        self.rows = [mx.concatenate([row, new[i : i + 1]], axis=2) for i, row in enumerate(self.rows)]

    def uneven(self, number: int) -> None:
        lengths = [1 + (number >> 2 * row) % 5 for row in range(len(self.rows))]
        new = mx.concatenate([self.new(max(lengths)) for _ in self.rows])
        self.packed = self.packed.prepare(lengths).append(new, -new)[0].finalize()
        self.rows = [
            mx.concatenate([row, new[i : i + 1, :, :length]], axis=2)
            for i, (row, length) in enumerate(zip(self.rows, lengths, strict=True))
        ]

    def filter(self, number: int) -> None:
        keep = [row for row in range(len(self.rows)) if number >> row & 1] or [number % len(self.rows)]
        self.packed, self.rows = self.packed.filter(keep), [self.rows[row] for row in keep]

    def extend(self, number: int) -> None:
        joining = [self.new(number % 7), self.new(number % 11)]
        other = BatchQuantizedCache.merged([single(row) for row in joining])
        self.packed, self.rows = self.packed.extend(other), self.rows + joining

    def trim(self, n: int) -> None:
        n = min(n, *(row.shape[2] for row in self.rows))
        self.packed = self.packed.trim(n)
        self.rows = [row[:, :, : row.shape[2] - n] for row in self.rows]

    def regroup(self, _: int) -> None:
        self.packed = BatchQuantizedCache.merged([self.packed.extract(row) for row in range(len(self.rows))])


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3), happenings=happenings)
@settings(max_examples=15, deadline=None)
def test_whatever_happens_each_rows_packed_bits_are_those_of_the_row_alone(
    normal: Normal, same_bits: Check, lengths: list[int], happenings: list[tuple[str, int]]
) -> None:
    both = Both(normal, same_bits, lengths)
    for what, number in happenings[:8]:
        both.happen(what, number)


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group_size", AFFINE_GROUPS)
def test_every_width_and_group_goes_through_a_batch(
    normal: Normal, same_bits: Check, bits: int, group_size: int
) -> None:
    empty = EmptyQuantizedCache(bits=bits, group_size=group_size)
    rows = [normal(1, (1, 2, 5, 128), mx.bfloat16), normal(2, (1, 2, 2, 128), mx.bfloat16)]
    batch = BatchQuantizedCache.merged([single(row, empty) for row in rows])
    assert batch.kind == f"batch-quantized-b{bits}-g{group_size}"
    for row, own in enumerate(rows):
        alone, expected = batch.extract(row), single(own, empty)
        assert isinstance(alone, QuantizedCache)
        assert isinstance(expected, QuantizedCache)
        for one, two in zip(parts(expected.keys), parts(alone.keys), strict=True):
            same_bits(one[:, :, : own.shape[2]], two)


def test_left_padding_of_an_empty_batch_counts_as_no_position(normal: Normal) -> None:
    batch = BatchQuantizedCache.empty([0, 2], EMPTY)
    assert batch.row_offsets == (0, -2)
    new = normal(0, (2, 1, 3, 32))
    longer = batch.append(new, new)[0]
    assert (longer.row_offsets, longer.extract(1).offset) == ((3, 1), 1)
    assert isinstance(batch.extract(0), EmptyQuantizedCache)


def test_two_widths_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        BatchQuantizedCache.merged([EMPTY, EmptyQuantizedCache(bits=8, group_size=32)])
    assert str(caught.value) == (
        "caches of different kinds cannot share a batch\n"
        "  first  quantized-b4-g32\n"
        "  other  quantized-b8-g32\n"
        "  next   batch sequences of one model and one KV mode"
    )


def test_planted_scales_that_stay_behind_are_seen(
    normal: Normal, same_bits: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(normal, same_bits, [3, 1])
    monkeypatch.setattr(
        "engine.cache.batch_quantized.rolled",
        lambda array, _shifts: array,  # words, scales and biases stay where they are
    )
    with pytest.raises(AssertionError):
        both.happen("uneven", 1)
