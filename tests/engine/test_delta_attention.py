"""Kimi delta attention: cutting a sequence changes no bit, and the hub's shapes are read."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from engine.cache.plain import PlainCache
from engine.cache.recurrent import RecurrentCache
from engine.checkpoint import Checkpoint
from engine.delta_attention import STATE_SLOTS, DeltaAttention, DeltaSizes
from engine.errors import CheckpointError
from engine.quantization import Quantization

D, H, E, K = 16, 2, 8, 3
SIZES = DeltaSizes(num_heads=H, head_dim=E, kda_layers=(1,), full_attn_layers=(), short_conv_kernel_size=K)
Normal = Callable[..., mx.array]


@pytest.fixture
def tensors(normal: Normal) -> dict[str, mx.array]:
    J = H * E
    shapes: dict[str, tuple[int, ...]] = {
        **{f"a.{name}_proj.weight": (J, D) for name in "qkv"},
        **{f"a.{name}_conv.conv.weight": (J, K, 1) for name in "qkv"},
        **{f"a.{name}_a_proj.weight": (E, D) for name in "fg"},
        **{f"a.{name}_b_proj.weight": (J, E) for name in "fg"},
        "a.b_proj.weight": (H, D),
        "a.A_log": (1, 1, H, 1),
        "a.dt_bias": (J,),
        "a.o_norm.weight": (E,),
        "a.o_proj.weight": (D, J),
    }
    return {name: normal(seed, shape) * 0.3 for seed, (name, shape) in enumerate(shapes.items())}


@pytest.fixture
def layer(tmp_path: Path) -> Callable[..., DeltaAttention]:
    def take(tensors: dict[str, mx.array], dtype: mx.Dtype = mx.float32) -> DeltaAttention:
        mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
        checkpoint = Checkpoint.open(tmp_path, dtype=dtype, quantization=Quantization())
        taken = DeltaAttention.take(checkpoint, "a", SIZES, width=D, eps=1e-5)
        checkpoint.finish(dropped={})
        return taken

    return take


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("cuts", [(1,), (1, 2, 3, 4, 5), (4,)])
def test_pieces_are_the_whole(
    *,
    layer: Callable[..., DeltaAttention],
    tensors: dict[str, mx.array],
    normal: Normal,
    same_bits: Callable[..., None],
    dtype: mx.Dtype,
    cuts: tuple[int, ...],
) -> None:
    x, taken = normal(99, (1, 6, D), dtype), layer(tensors, dtype)
    whole, end = taken(x, RecurrentCache.empty(STATE_SLOTS))
    assert (end.offset, end.kind, whole.dtype) == (6, "arrays-4", dtype)
    cache, rows = RecurrentCache.empty(STATE_SLOTS), []
    for start, stop in zip((0, *cuts), (*cuts, 6), strict=True):
        row, cache = taken(x[:, start:stop], cache)
        rows.append(row)
    same_bits(whole, mx.concatenate(rows, axis=1))
    for one, two in zip(end.arrays, cache.arrays, strict=True):
        same_bits(one, two)


def test_the_hubs_filters_and_bias_are_the_same_layer(
    layer: Callable[..., DeltaAttention],
    tensors: dict[str, mx.array],
    normal: Normal,
    same_bits: Callable[..., None],
) -> None:
    x = normal(99, (1, 6, D))
    expected, _ = layer(tensors)(x, RecurrentCache.empty(STATE_SLOTS))
    mx.eval(expected)
    hub = {name: array for name, array in tensors.items() if "_conv.conv" not in name}
    hub |= {f"a.{n}_conv1d.weight": tensors[f"a.{n}_conv.conv.weight"].swapaxes(1, 2) for n in "qkv"}
    hub["a.dt_bias"] = tensors["a.dt_bias"].reshape(H, E)
    actual, _ = layer(hub)(x, RecurrentCache.empty(STATE_SLOTS))
    same_bits(expected, actual)


def test_both_names_of_a_filter_at_once_are_refused(
    layer: Callable[..., DeltaAttention], tensors: dict[str, mx.array]
) -> None:
    twice = {**tensors, "a.q_conv1d.weight": tensors["a.q_conv.conv.weight"].swapaxes(1, 2)}
    with pytest.raises(CheckpointError, match="the checkpoint mixes two layouts"):
        layer(twice)


def test_another_cache_is_an_error(layer: Callable[..., DeltaAttention], tensors: dict[str, mx.array]) -> None:
    with pytest.raises(TypeError, match="a layer of delta attention was handed a cache of kind plain"):
        layer(tensors)(mx.zeros((1, 1, D)), PlainCache())
