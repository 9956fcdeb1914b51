"""From the hub's joint projection to one layer for keys and one for values, dense and packed."""

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.latent_layout import further_layers, split_joint_projection
from engine.quantization import Quantization

H, C, N, E = 2, 64, 32, 64
Normal = Callable[..., mx.array]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[dict[str, mx.array]], Checkpoint]:
    def write(tensors: dict[str, mx.array]) -> Checkpoint:
        mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
        return Checkpoint.open(tmp_path, dtype=mx.float32, quantization=Quantization())

    return write


def split(checkpoint: Checkpoint) -> None:
    split_joint_projection(checkpoint, "a", heads=H, rank=C, own=N, value=E)


def test_a_dense_projection_is_cut_by_heads_and_no_bit_changes(
    opened: Callable[..., Checkpoint], normal: Normal, same_bits: Callable[..., None]
) -> None:
    joint = normal(0, (H * (N + E), C))
    checkpoint = opened({"a.kv_b_proj.weight": joint})
    split(checkpoint)
    keys, values = checkpoint.take("a.embed_q.weight", (H, C, N)), checkpoint.take("a.unembed_out.weight", (H, E, C))
    for head in range(H):
        own = joint[head * (N + E) : (head + 1) * (N + E)]
        same_bits(own[:N].T, keys[head])
        same_bits(own[N:], values[head])
    checkpoint.finish(dropped={})


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_packed_projection_is_packed_again_in_the_dtype_of_the_file(
    *, opened: Callable[..., Checkpoint], normal: Normal, same_bits: Callable[..., None], dtype: mx.Dtype
) -> None:
    packed = mx.quantize(normal(0, (H * (N + E), C), dtype), group_size=32, bits=4)
    checkpoint = opened(
        dict(zip((f"a.kv_b_proj.{leaf}" for leaf in ("weight", "scales", "biases")), packed, strict=True))
    )
    split(checkpoint)
    dense = mx.dequantize(*packed, group_size=32, bits=4).reshape(H, N + E, C)
    assert dense.dtype == dtype
    for name, part in (("embed_q", dense[:, :N].swapaxes(1, 2)), ("unembed_out", dense[:, N:])):
        words, scales, biases = mx.quantize(part, group_size=32, bits=4)
        same_bits(words, checkpoint.take(f"a.{name}.weight", words.shape, stored=mx.uint32))
        same_bits(scales, checkpoint.take(f"a.{name}.scales", scales.shape, stored=dtype))
        same_bits(biases, checkpoint.take(f"a.{name}.biases", biases.shape, stored=dtype))


def test_without_a_joint_projection_nothing_changes(opened: Callable[..., Checkpoint]) -> None:
    checkpoint = opened({"a.embed_q.weight": mx.zeros((H, C, N))})
    split(checkpoint)
    assert checkpoint.names == ("a.embed_q.weight",)


def test_rows_that_do_not_fit_the_heads_are_refused(opened: Callable[..., Checkpoint]) -> None:
    with pytest.raises(ConfigError) as caught:
        split(opened({"a.kv_b_proj.weight": mx.zeros((100, C))}))
    assert str(caught.value) == (
        "a.kv_b_proj.weight does not fit the heads of config.json\n"
        "  expected rows  192\n"
        "  found          [100, 64]\n"
        "  next           take the config.json that belongs to these weights"
    )


def test_both_layouts_at_once_are_refused(opened: Callable[..., Checkpoint]) -> None:
    tensors = {"a.kv_b_proj.weight": mx.zeros((H * (N + E), C)), "a.embed_q.weight": mx.zeros((H, C, N))}
    with pytest.raises(CheckpointError, match="the checkpoint mixes two layouts"):
        split(opened(tensors))


def test_further_layers_are_those_after_the_last_and_no_others() -> None:
    patterns = further_layers(4, 2)

    def dropped(name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in patterns)

    assert [dropped(f"model.layers.{i}.x.weight") for i in (3, 4, 5, 6, 40)] == [False, True, True, False, False]
    assert further_layers(4, 0) == {}
