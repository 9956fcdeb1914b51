"""The norms against their definitions in numpy, one rounding at a time (spec/cpu.md section 1), and their eps."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.norm import LayerNorm, RMSNorm
from engine.quantization import Quantization

Floats = npt.NDArray[np.float32]


def normalised(x_ND: Floats, eps: float) -> Floats:
    """x / rms(x) in float32: a sequential sum, times 1/n, plus eps, one over the root, times x."""
    rows = []
    for row in x_ND:
        total = np.float32(0)
        for value in row:
            total = total + value * value
        mean = total * (np.float32(1) / np.float32(len(row)))
        rows.append(row * (np.float32(1) / np.sqrt(mean + np.float32(eps))))
    return np.array(rows, dtype=np.float32)


def rounded(values: Floats, dtype: mx.Dtype) -> Floats:
    return np.array(mx.array(values).astype(dtype).astype(mx.float32))


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 70),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 300.0]),
    eps=st.sampled_from([1e-6, 1e-5, 0.5]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
@settings(max_examples=60, deadline=None)
def test_the_norm_is_its_definition_bit_for_bit(
    *, same_bits: Callable[..., None], seed: int, width: int, scale: float, eps: float, dtype: mx.Dtype
) -> None:
    random = np.random.default_rng(seed)
    x = rounded(random.standard_normal((3, width), dtype=np.float32) * np.float32(scale), dtype)
    weight = rounded(random.standard_normal(width, dtype=np.float32), dtype)
    expected = rounded(rounded(normalised(x, eps), dtype) * weight, dtype)
    norm = RMSNorm(path="n", weight=mx.array(weight).astype(dtype), eps=eps)
    same_bits(mx.array(expected).astype(dtype), norm(mx.array(x).astype(dtype)))


def test_the_weight_is_applied_after_rounding(normal: Callable[..., mx.array], other_bits: Callable[..., None]) -> None:
    x, weight = normal(0, (4, 64), mx.bfloat16), normal(1, (64,), mx.bfloat16)
    fused = normalised(np.array(x.astype(mx.float32)), 1e-5) * np.array(weight.astype(mx.float32))
    other_bits(mx.array(fused).astype(mx.bfloat16), RMSNorm(path="n", weight=weight, eps=1e-5)(x))


def test_eps_counts(normal: Callable[..., mx.array], other_bits: Callable[..., None]) -> None:
    x, weight = normal(0, (4, 64)), mx.ones((64,))
    other_bits(RMSNorm(path="n", weight=weight, eps=1e-5)(x), RMSNorm(path="n", weight=weight, eps=1e-6)(x))


def test_leading_axes_are_rows(normal: Callable[..., mx.array], same_bits: Callable[..., None]) -> None:
    x, norm = normal(0, (2, 3, 64)), RMSNorm(path="n", weight=normal(1, (64,)), eps=1e-5)
    same_bits(norm(x.reshape(6, 64)).reshape(2, 3, 64), norm(x))


def test_the_weight_is_taken_by_name_and_width(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"m.norm.weight": mx.array([1.0, 2.0])})
    source = Checkpoint.open(tmp_path, dtype=mx.float32, quantization=Quantization())
    with pytest.raises(CheckpointError, match=r"^tensor m\.norm\.weight has the wrong shape\n"):
        RMSNorm.take(source, "m.norm", width=3, eps=1e-5)
    assert RMSNorm.take(source, "m.norm", width=2, eps=1e-5).weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_norm_without_a_weight_rounds_once(
    normal: Callable[..., mx.array], same_bits: Callable[..., None], dtype: mx.Dtype
) -> None:
    x = normal(0, (4, 65), dtype)
    expected = mx.array(normalised(np.array(x.astype(mx.float32)), 1e-5)).astype(dtype)
    same_bits(expected, RMSNorm(path="n", weight=None, eps=1e-5)(x))


def stored(folder: Path, dtype: mx.Dtype, **tensors: mx.array) -> Checkpoint:
    mx.save_safetensors(str(folder / "model.safetensors"), {f"n.{leaf}": array for leaf, array in tensors.items()})
    return Checkpoint.open(folder, dtype=dtype, quantization=Quantization())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_plus_one_is_added_in_the_weights_dtype(
    tmp_path: Path,
    normal: Callable[..., mx.array],
    same_bits: Callable[..., None],
    other_bits: Callable[..., None],
    dtype: mx.Dtype,
) -> None:
    weight = normal(1, (64,)) * 0.1
    plain = RMSNorm.take(stored(tmp_path, dtype, weight=weight), "n", width=64, eps=1e-5)
    plus = RMSNorm.take(stored(tmp_path, dtype, weight=weight), "n", width=64, eps=1e-5, plus_one=True)
    one_plus = rounded(1 + rounded(np.array(weight), dtype), dtype)
    same_bits(mx.array(one_plus).astype(dtype), plus.weight)
    x = normal(0, (4, 64), dtype)
    expected = rounded(rounded(normalised(np.array(x.astype(mx.float32)), 1e-5), dtype) * one_plus, dtype)
    same_bits(mx.array(expected).astype(dtype), plus(x))
    other_bits(plain(x), plus(x))


# mean and variance


def centred(x_ND: Floats, eps: float) -> Floats:
    """(x - mean) / sqrt(variance + eps) in float32; both means are sequential sums times 1/n."""
    rows = []
    for row in x_ND:
        per_element = np.float32(1) / np.float32(len(row))
        total, squares = np.float32(0), np.float32(0)
        for value in row:
            total = total + value
        away = row - total * per_element
        for value in away:
            squares = squares + value * value
        rows.append(away * (np.float32(1) / np.sqrt(squares * per_element + np.float32(eps))))
    return np.array(rows, dtype=np.float32)


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(2, 70),
    shift=st.sampled_from([0.0, 1.0, 300.0]),
    eps=st.sampled_from([1e-6, 1e-5, 0.5]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    leaves=st.sampled_from(["", "weight", "bias", "weight bias"]),
)
@settings(max_examples=60, deadline=None)
def test_the_layer_norm_is_its_definition_bit_for_bit(
    *, same_bits: Callable[..., None], seed: int, width: int, shift: float, eps: float, dtype: mx.Dtype, leaves: str
) -> None:
    random = np.random.default_rng(seed)
    x = rounded(random.standard_normal((3, width), dtype=np.float32) + np.float32(shift), dtype)
    weight, bias = (rounded(random.standard_normal(width, dtype=np.float32), dtype) for _ in range(2))
    expected = rounded(centred(x, eps), dtype)
    if "weight" in leaves:
        expected = rounded(expected * weight, dtype)
    if "bias" in leaves:
        expected = rounded(expected + bias, dtype)
    norm = LayerNorm(
        path="n",
        weight=mx.array(weight).astype(dtype) if "weight" in leaves else None,
        bias=mx.array(bias).astype(dtype) if "bias" in leaves else None,
        eps=eps,
    )
    same_bits(mx.array(expected).astype(dtype), norm(mx.array(x).astype(dtype)))


def test_the_layer_norms_eps_counts(normal: Callable[..., mx.array], other_bits: Callable[..., None]) -> None:
    one, other = (LayerNorm(path="n", weight=None, bias=None, eps=eps) for eps in (1e-5, 1e-6))
    other_bits(one(normal(0, (4, 64))), other(normal(0, (4, 64))))


def test_a_layer_norm_takes_its_bias_only_where_it_has_one(tmp_path: Path) -> None:
    tensors = {"weight": mx.array([1.0, 2.0]), "bias": mx.array([3.0, 4.0])}
    source = stored(tmp_path, mx.float32, **tensors)
    norm = LayerNorm.take(source, "n", width=2, eps=1e-5)
    source.finish(dropped={})
    assert norm.weight is not None
    assert norm.bias is not None
    assert (norm.weight.tolist(), norm.bias.tolist()) == ([1.0, 2.0], [3.0, 4.0])
    without = stored(tmp_path, mx.float32, weight=tensors["weight"])
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no tensor n\.bias\n"):
        LayerNorm.take(without, "n", width=2, eps=1e-5)
    assert LayerNorm.take(stored(tmp_path, mx.float32, weight=tensors["weight"]), "n", width=2, eps=1e-5, bias=False)
