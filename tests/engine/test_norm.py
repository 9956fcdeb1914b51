"""The norm against its definition in numpy, one rounding at a time (spec/cpu.md section 1), and its eps."""

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
from engine.norm import RMSNorm
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
