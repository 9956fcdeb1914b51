"""The gated norm against its definition, and norms that the hub stores less one."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.norm import GatedRMSNorm, RMSNorm
from engine.quantization import Quantization

Normal = Callable[..., mx.array]
Check = Callable[..., None]


def opened(folder: Path, weight: mx.array, dtype: mx.Dtype = mx.float32) -> Checkpoint:
    mx.save_safetensors(str(folder / "model.safetensors"), {"m.norm.weight": weight})
    return Checkpoint.open(folder, dtype=dtype, quantization=Quantization())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_the_norm_is_rounded_and_the_gate_is_not(normal: Normal, same_bits: Check, dtype: mx.Dtype) -> None:
    x, gate, weight = normal(0, (2, 3, 4, 16), dtype), normal(1, (2, 3, 4, 16), dtype), normal(2, (16,), dtype)
    normed = RMSNorm(path="n", weight=weight, eps=1e-6)(x).astype(mx.float32)
    wide = gate.astype(mx.float32)
    expected = (wide * mx.sigmoid(wide) * normed).astype(dtype)
    same_bits(expected, GatedRMSNorm(path="n", weight=weight, eps=1e-6)(x, gate))


def test_a_gate_rounded_to_16_bits_would_be_seen(normal: Normal, other_bits: Check) -> None:
    x, gate, weight = (normal(seed, (4, 16), mx.bfloat16) for seed in range(3))
    normed = RMSNorm(path="n", weight=weight[0], eps=1e-6)(x)
    other_bits(gate * mx.sigmoid(gate) * normed, GatedRMSNorm(path="n", weight=weight[0], eps=1e-6)(x, gate))


def test_one_is_added_in_the_dtype_of_the_file(
    tmp_path: Path, normal: Normal, same_bits: Check, other_bits: Check
) -> None:
    stored = normal(0, (64,), mx.bfloat16) * 0.1
    checkpoint = opened(tmp_path, stored)
    weight = RMSNorm.take(checkpoint, "m.norm", width=64, eps=1e-6, stored_less_one=True).weight
    checkpoint.finish(dropped={})
    same_bits((stored + 1).astype(mx.float32), weight)
    other_bits(stored.astype(mx.float32) + 1, weight)


def test_a_norm_less_one_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no tensor m\.other\.weight\n"):
        RMSNorm.take(opened(tmp_path, mx.ones((4,))), "m.other", width=4, eps=1e-6, stored_less_one=True)
