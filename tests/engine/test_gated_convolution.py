"""The gated convolution: two gates around the filter, both shapes of the filters, and no seam between two calls."""

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import pytest

from engine.cache.recurrent import RecurrentCache
from engine.checkpoint import Checkpoint
from engine.gated_convolution import STATE_SLOTS, GatedConvolution
from engine.quantization import Quantization
from engine.taps import watching

Check = Callable[..., None]
Normal = Callable[..., mx.array]
D, K = 8, 3
EMPTY = RecurrentCache.empty(STATE_SLOTS)


@pytest.fixture
def layer(tmp_path: Path, normal: Normal) -> Callable[..., GatedConvolution]:
    def make(*, hub: bool = False, bias: bool = True, dtype: mx.Dtype = mx.float32) -> GatedConvolution:
        filters = normal(1, (D, K, 1))
        tensors = {
            "m.in_proj.weight": normal(0, (3 * D, D)) / 3,
            "m.conv.weight": mx.contiguous(filters.swapaxes(1, 2)) if hub else filters,
            "m.out_proj.weight": normal(2, (D, D)) / 3,
        }
        if bias:
            tensors |= {
                "m.in_proj.bias": normal(3, (3 * D,)),
                "m.conv.bias": normal(4, (D,)),
                "m.out_proj.bias": normal(5, (D,)),
            }
        folder = Path(mkdtemp(dir=tmp_path))  # arrays are read when they are needed: one folder a layer
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        checkpoint = Checkpoint.open(folder, dtype=dtype, quantization=Quantization())
        taken = GatedConvolution.take(checkpoint, "m", width=D, kernel=K, bias=bias)
        checkpoint.finish(dropped={})
        return taken

    return make


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_first_gate_goes_in_and_the_second_comes_out(
    layer: Callable[..., GatedConvolution], normal: Normal, same_bits: Check, *, dtype: mx.Dtype, bias: bool
) -> None:
    module, x = layer(bias=bias, dtype=dtype), normal(9, (2, 5, D), dtype)
    first, second, inner = mx.split(module.into(x), 3, axis=-1)
    filtered, _ = module.convolution(first * inner, None)
    same_bits(module.out(second * filtered), module(x, EMPTY)[0])


def test_filters_as_on_the_hub_are_the_converted_ones(
    layer: Callable[..., GatedConvolution], normal: Normal, same_bits: Check
) -> None:
    x = normal(9, (1, 5, D))
    same_bits(layer()(x, EMPTY)[0], layer(hub=True)(x, EMPTY)[0])


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_two_calls_are_one(layer: Callable[..., GatedConvolution], normal: Normal, same_bits: Check, cut: int) -> None:
    module, x = layer(), normal(9, (1, 6, D))
    whole, at_once = module(x, EMPTY)
    first, between = module(x[:, :cut], EMPTY)
    second, after = module(x[:, cut:], between)
    same_bits(whole, mx.concatenate([first, second], axis=1))
    same_bits(at_once.arrays[0], after.arrays[0])
    assert (after.offset, after.arrays[0].shape) == (6, (1, K - 1, D))


def test_every_module_shows_its_output(layer: Callable[..., GatedConvolution], normal: Normal) -> None:
    seen: dict[str, mx.array] = {}
    with watching(seen.__setitem__):
        layer()(normal(9, (1, 2, D)), EMPTY)
    assert list(seen) == ["m.in_proj", "m.conv", "m.out_proj", "m"]
