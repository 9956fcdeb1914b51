"""Tiles: the same attention up to rounding, in other bits; and what is not tiled is refused or said."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine import tiled_attention
from engine.attention import attend
from engine.cache.protocol import PackedHeads, Tiling
from engine.cache.quantized import pack
from engine.errors import RequestError
from engine.packed_attention import attend_packed
from engine.tiled_attention import attend_tiled

Check = Callable[..., None]
Normal = Callable[..., mx.array]

E, SCALE, LIFTED = 64, 64**-0.5, Tiling(size=7, lifted=True)
every_length = pytest.mark.parametrize("L", [1, 5])
every_mask = pytest.mark.parametrize("mask", [None, "causal"])


def inputs(normal: Normal, *, L: int, T: int = 40, dtype: mx.Dtype = mx.float32, tiling: Tiling | None = None) -> tuple[
    mx.array, PackedHeads, PackedHeads
]:  # fmt: skip
    q, k, v = normal(0, (2, 6, L, E), dtype), normal(1, (2, 2, T, E), dtype), normal(2, (2, 2, T, E), dtype)
    keys, values = (pack(heads, bits=8, group_size=32, tiling=tiling) for heads in (k, v))
    return q, keys, values


@every_length
@every_mask
@pytest.mark.parametrize("size", [1, 7, 16, 39, 40, 512])
def test_tiles_of_every_size_give_the_attention_of_all_positions_up_to_rounding(
    normal: Normal, L: int, mask: str | None, size: int
) -> None:
    q, keys, values = inputs(normal, L=L)
    tiling = Tiling(size=size, lifted=True)
    tiled = attend_tiled(q, keys, values, scale=SCALE, mask=mask, tiling=tiling)  # type: ignore[arg-type]
    whole = attend_packed(q, keys, values, scale=SCALE, mask=mask)  # type: ignore[arg-type]
    assert tiled.shape == whole.shape
    assert np.abs(np.array(tiled) - np.array(whole)).max() < 2e-6


def test_the_size_of_a_tile_changes_bits(normal: Normal, other_bits: Check) -> None:
    q, keys, values = inputs(normal, L=5)
    one, other = (
        attend_tiled(q, keys, values, scale=SCALE, mask="causal", tiling=Tiling(size=size, lifted=True))
        for size in (7, 16)
    )
    other_bits(one, other)


def test_a_tile_is_the_size_it_says(normal: Normal, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    right = tiled_attention._positions

    def watched(heads: PackedHeads, begin: int, end: int) -> PackedHeads:
        seen.append((begin, end))
        return right(heads, begin, end)

    monkeypatch.setattr(tiled_attention, "_positions", watched)
    q, keys, values = inputs(normal, L=1, T=20)
    attend_tiled(q, keys, values, scale=SCALE, mask=None, tiling=LIFTED)
    assert seen == [(0, 7), (0, 7), (7, 14), (7, 14), (14, 20), (14, 20)]  # keys and values of each


def test_a_row_that_sees_nothing_of_a_tile_is_not_moved_by_it(normal: Normal) -> None:
    # the first of 14 causal queries over 14 positions sees position 0 alone: its output is that value
    q, keys, values = inputs(normal, L=14, T=14)
    out = attend_tiled(q, keys, values, scale=SCALE, mask="causal", tiling=LIFTED)
    value = mx.dequantize(values.weight, values.scales, values.biases, group_size=32, bits=8)[:, :, 0]
    assert np.abs(np.array(out[:, ::3, 0]) - np.array(value)).max() < 2e-6


def test_a_matrix_of_allowed_positions_is_not_tiled(normal: Normal, same_bits: Check) -> None:
    q, keys, values = inputs(normal, L=5)
    allowed = mx.array(np.tri(5, 40, 35, dtype=bool))
    tiled = attend_tiled(q, keys, values, scale=SCALE, mask=allowed, tiling=LIFTED)
    same_bits(attend_packed(q, keys, values, scale=SCALE, mask=allowed), tiled)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bit_queries_need_no_lifting_and_lifting_does_not_change_them(
    normal: Normal, same_bits: Check, dtype: mx.Dtype
) -> None:
    q, keys, values = inputs(normal, L=5, dtype=dtype)
    shipped, lifted = (
        attend_tiled(q, keys, values, scale=SCALE, mask="causal", tiling=Tiling(size=7, lifted=lifted))
        for lifted in (False, True)
    )
    assert shipped.dtype == dtype
    same_bits(shipped, lifted)


def test_float32_is_refused_where_it_is_not_lifted(normal: Normal) -> None:
    q, keys, values = inputs(normal, L=1)
    with pytest.raises(RequestError) as caught:
        attend_tiled(q, keys, values, scale=SCALE, mask=None, tiling=Tiling(size=7))
    assert str(caught.value) == (
        "queries of this dtype are not tiled\n"
        "  dtype   float32\n"
        "  reason  the oracle as it is released tiles 16-bit floats alone, and others not, without a word\n"
        "  next    use bf16 or f16, or the lifted tiling"
    )


def test_attention_goes_through_tiles_where_the_heads_say_so(
    normal: Normal, same_bits: Check, other_bits: Check
) -> None:
    q, keys, values = inputs(normal, L=5, tiling=LIFTED)
    attended = attend(q, keys, values, scale=SCALE, mask="causal")
    same_bits(attend_tiled(q, keys, values, scale=SCALE, mask="causal", tiling=LIFTED), attended)
    other_bits(attend_packed(q, keys, values, scale=SCALE, mask="causal"), attended)


def test_sinks_are_refused_and_not_left_out(normal: Normal) -> None:
    q, keys, values = inputs(normal, L=1, tiling=LIFTED)
    with pytest.raises(RequestError, match="attention with sinks is not tiled"):
        attend(q, keys, values, scale=SCALE, mask=None, sinks_H=mx.zeros((6,)))
