"""The short convolution: each channel by itself, nothing to come, and what is remembered joins two calls without a seam."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.quantization import Quantization
from engine.short_convolution import ShortConvolution
from engine.taps import watching

Normal = Callable[..., mx.array]
Check = Callable[..., None]


def filtered(x_LC: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """The definition: products and sums in float32, in the order of positions, rounded to the dtype; then the bias."""
    x, w = np.array(x_LC.astype(mx.float32)), np.array(weight.astype(mx.float32))[..., 0]
    K = w.shape[1]
    padded = np.concatenate([np.zeros((K - 1, x.shape[1]), np.float32), x])
    out = np.zeros_like(x)
    for i in range(x.shape[0]):
        for j in range(K):
            out[i] += padded[i + j] * w[:, j]
    rounded = mx.array(out).astype(x_LC.dtype)
    return rounded if bias is None else rounded + bias


@given(
    seed=st.integers(0, 2**32 - 1), L=st.integers(1, 9), C=st.integers(1, 20), K=st.integers(1, 5), bias=st.booleans()
)
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_it_is_its_definition_bit_for_bit(
    *, normal: Normal, same_bits: Check, seed: int, L: int, C: int, K: int, bias: bool, dtype: mx.Dtype
) -> None:
    x, weight = normal(seed, (1, L, C), dtype), normal(seed + 1, (C, K, 1), dtype)
    shift = normal(seed + 2, (C,), dtype) if bias else None
    y, kept = ShortConvolution(path="c", weight=weight, bias=shift)(x, None)
    same_bits(filtered(x[0], weight, shift), y[0])
    assert kept.shape == (1, K - 1, C)


@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 10), K=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_two_pieces_give_the_whole(
    *, normal: Normal, same_bits: Check, seed: int, cut: int, K: int, dtype: mx.Dtype
) -> None:
    x, convolution = normal(seed, (2, 11, 6), dtype), ShortConvolution(path="c", weight=normal(1, (6, K, 1), dtype))
    whole, kept = convolution(x, None)
    first, between = convolution(x[:, :cut], None)
    second, after = convolution(x[:, cut:], between)
    same_bits(whole, mx.concatenate([first, second], axis=1))
    same_bits(kept, after)


def test_a_position_sees_its_window_and_nothing_to_come(normal: Normal, same_bits: Check, other_bits: Check) -> None:
    x, convolution = normal(0, (1, 8, 4)), ShortConvolution(path="c", weight=normal(1, (4, 3, 1)))
    changed = mx.concatenate([x[:, :4], x[:, 4:5] + 1, x[:, 5:]], axis=1)
    one, two = convolution(x, None)[0], convolution(changed, None)[0]
    same_bits(one[:, :4], two[:, :4])
    for position in (4, 5, 6):
        other_bits(one[:, position], two[:, position])
    same_bits(one[:, 7:], two[:, 7:])


def test_channels_do_not_mix(normal: Normal, same_bits: Check) -> None:
    x, weight = normal(0, (1, 8, 4)), normal(1, (4, 3, 1))
    whole, _ = ShortConvolution(path="c", weight=weight)(x, None)
    alone, _ = ShortConvolution(path="c", weight=weight[2:3])(x[..., 2:3], None)
    same_bits(whole[..., 2:3], alone)


def test_it_is_watched_under_its_path(normal: Normal) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    with watching(lambda path, value: seen.append((path, value.shape))):
        ShortConvolution(path="m.conv1d", weight=normal(1, (4, 3, 1)))(normal(0, (1, 8, 4)), None)
    assert seen == [("m.conv1d", (1, 8, 4))]


def opened(folder: Path, **tensors: mx.array) -> Checkpoint:
    mx.save_safetensors(str(folder / "model.safetensors"), {f"m.conv1d.{name}": a for name, a in tensors.items()})
    return Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization())


def test_the_hubs_filters_are_the_converted_ones(normal: Normal, same_bits: Check, tmp_path: Path) -> None:
    weight, bias, x = normal(0, (4, 3, 1)), normal(1, (4,)), normal(2, (1, 8, 4))
    outputs = []
    for stored, channels_first in ((weight, False), (mx.contiguous(weight.swapaxes(1, 2)), True)):
        checkpoint = opened(tmp_path, weight=stored, bias=bias)
        taken = ShortConvolution.take(
            checkpoint, "m.conv1d", channels=4, kernel=3, bias=True, channels_first=channels_first
        )
        checkpoint.finish(dropped={})
        outputs.append(taken(x, None)[0])
        mx.eval(outputs)
    same_bits(ShortConvolution(path="m.conv1d", weight=weight, bias=bias)(x, None)[0], outputs[0])
    same_bits(outputs[0], outputs[1])


@pytest.mark.parametrize("channels_first", [False, True])
def test_filters_of_the_other_layout_are_refused(normal: Normal, tmp_path: Path, channels_first: bool) -> None:
    shape = (4, 3, 1) if channels_first else (4, 1, 3)
    with pytest.raises(CheckpointError, match=r"^tensor m\.conv1d\.weight has the wrong shape\n"):
        ShortConvolution.take(
            opened(tmp_path, weight=normal(0, shape)), "m.conv1d", channels=4, kernel=3, channels_first=channels_first
        )


def test_a_rows_window_ends_where_its_right_padding_begins(normal: Normal, same_bits: Check) -> None:
    convolution = ShortConvolution(path="c", weight=normal(0, (3, 4, 1)))
    x, before = normal(1, (3, 5, 3)), normal(2, (3, 3, 3))
    _, window = convolution(x, before, (5, 2, 1))
    for row, end in enumerate((5, 2, 1)):
        _, alone = convolution(x[row : row + 1, :end], before[row : row + 1])
        same_bits(alone, window[row : row + 1])
