"""Tiles of 8-bit floats: each is multiplied by its own factor, at the edge too, and rounded once to bfloat16."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.block_float8 import unpack_tiles
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.quantization import Quantization
from parity.models.hub_layouts.block_float8 import with_block_float8
from parity.safetensors_file import dumps
from parity.tensor import Tensor

HUB_WORDS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[dict[str, mx.array]], Checkpoint]:
    def write(tensors: dict[str, mx.array]) -> Checkpoint:
        mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
        return Checkpoint.open(tmp_path, dtype=mx.float32, quantization=Quantization())

    return write


def test_a_value_is_its_byte_times_the_factor_of_its_tile(opened: Callable[..., Checkpoint]) -> None:
    codes = np.random.default_rng(0).integers(0, 127, (130, 260), dtype=np.uint8)
    factors = np.array([[0.3, 1.7, 0.011], [2.5, 0.07, 9.1]], dtype=np.float32)
    checkpoint = opened({"a.weight": mx.array(codes), "a.weight_scale_inv": mx.array(factors)})
    unpack_tiles(checkpoint)
    values = np.array(checkpoint.take("a.weight", (130, 260)))
    checkpoint.finish(dropped={})
    bytes_ = np.array(mx.from_fp8(mx.array(codes), dtype=mx.float32))
    for i, j in ((0, 0), (127, 127), (128, 127), (0, 128), (129, 259), (128, 256), (127, 255)):
        product = mx.array(bytes_[i, j] * factors[i // 128, j // 128]).astype(mx.bfloat16)
        assert values[i, j] == product.item()


def test_an_8_bit_float_has_its_published_value() -> None:
    codes = {0x00: 0.0, 0x01: 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x39: 1.125, 0x7E: 448.0, 0xB8: -1.0}
    assert np.array(mx.from_fp8(mx.array(list(codes), dtype=mx.uint8), dtype=mx.float32)).tolist() == [*codes.values()]


def test_what_is_drawn_for_the_tests_comes_back_near(tmp_path: Path) -> None:
    drawn = np.random.default_rng(1).standard_normal((200, 150)).astype(np.float32)
    tiles = with_block_float8({"a.weight": Tensor.of(drawn), "b": Tensor.of(drawn)}, ["a.weight"])
    assert tiles["b"] == Tensor.of(drawn)
    (tmp_path / "model.safetensors").write_bytes(dumps(tiles))
    checkpoint = Checkpoint.open(tmp_path, dtype=mx.float32, quantization=Quantization())
    unpack_tiles(checkpoint)
    back = np.array(checkpoint.take("a.weight", (200, 150)))
    far = np.abs(back - drawn) > np.maximum(np.abs(drawn) / 14, 0.002)  # three bits of mantissa, then bfloat16
    assert not far.any()


@pytest.mark.parametrize(
    ("tensors", "weight", "factors"),
    [
        ({"a.weight": mx.zeros((130, 8), mx.uint8), "a.weight_scale_inv": mx.ones((1, 1))}, [130, 8], [1, 1]),
        ({"a.weight_scale_inv": mx.ones((1, 1))}, None, [1, 1]),
    ],
)
def test_factors_that_are_not_one_a_tile_are_refused(
    opened: Callable[..., Checkpoint], tensors: dict[str, mx.array], weight: object, factors: object
) -> None:
    with pytest.raises(CheckpointError) as caught:
        unpack_tiles(opened(tensors))
    assert str(caught.value) == (
        "the factors of a.weight are not one a tile of 128 x 128\n"
        f"  weight   {weight}\n"
        f"  factors  {factors}\n"
        "  next     take a snapshot as the hub has it, or a converted one"
    )


@pytest.mark.parametrize("more", [{}, {"scale_fmt": "ue8m0"}])
def test_the_hubs_words_for_tiles_mean_that_nothing_is_packed(more: dict[str, str]) -> None:
    assert Quantization.from_config({"quantization_config": {**HUB_WORDS, **more}}) == Quantization()


@pytest.mark.parametrize("change", [{"weight_block_size": [32, 32]}, {"fmt": "e5m2"}, {"rotation": True}])
def test_other_tiles_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"the quantization entry of config\.json is malformed"):
        Quantization.from_config({"quantization_config": {**HUB_WORDS, **change}})
