"""Linear layers and embeddings: a packed product has the bits of the dequantised one, and every tensor is used."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.linear import Embedding, Linear, Packed
from engine.quantization import AFFINE_BITS, AFFINE_GROUPS, FLOATING, Format, Quantization

Check = Callable[..., None]
Normal = Callable[..., mx.array]

every_format = pytest.mark.parametrize(
    ("bits", "group_size"), [(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUPS]
)


def packed(matrix: mx.array, bits: int, group_size: int) -> tuple[Packed, mx.array]:
    """A matrix packed, and what the packed one stands for."""
    weight, scales, biases = mx.quantize(matrix, group_size=group_size, bits=bits)
    form = Format(bits=bits, group_size=group_size)
    dense = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)
    return Packed(weight=weight, scales=scales, biases=biases, format=form), dense


@every_format
@pytest.mark.parametrize("rows", [1, 5])
def test_a_packed_float32_product_has_the_bits_of_the_dequantised_one(
    normal: Normal, same_bits: Check, bits: int, group_size: int, rows: int
) -> None:
    matrix, dense = packed(normal(bits, (24, 256)), bits, group_size)
    x = normal(9, (2, rows, 256))
    same_bits(x @ dense.T, matrix.product(x))


@every_format
def test_embedding_rows_of_a_packed_table_are_the_dequantised_rows(
    normal: Normal, same_bits: Check, bits: int, group_size: int
) -> None:
    table, dense = packed(normal(bits, (16, 256)), bits, group_size)
    ids = mx.array([[3, 3, 15], [0, 7, 2]])
    same_bits(dense[ids], Embedding(path="e", weight=table)(ids))


def test_a_sixteen_bit_packed_product_differs_from_the_dequantised_one(normal: Normal, other_bits: Check) -> None:
    matrix, dense = packed(normal(1, (24, 256), mx.bfloat16), 4, 64)
    x = normal(9, (4, 256), mx.bfloat16)
    other_bits(x @ dense.T, matrix.product(x))  # it rounds every operation; a shortcut over dense weights would not


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_dense_layer_adds_its_bias_in_one_fused_operation(normal: Normal, same_bits: Check, dtype: mx.Dtype) -> None:
    weight, bias, x = normal(0, (24, 64), dtype), normal(1, (24,), dtype), normal(2, (2, 3, 64), dtype)
    same_bits(mx.addmm(bias, x, weight.T), Linear(path="l", weight=weight, bias=bias)(x))
    same_bits(x @ weight.T, Linear(path="l", weight=weight)(x))


def test_the_fused_bias_of_a_sixteen_bit_layer_is_not_an_addition_after_rounding(
    normal: Normal, other_bits: Check
) -> None:
    weight, bias, x = (normal(seed, shape, mx.bfloat16) for seed, shape in ((0, (64, 64)), (1, (64,)), (2, (8, 64))))
    other_bits(x @ weight.T + bias, Linear(path="l", weight=weight, bias=bias)(x))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_packed_layer_adds_its_bias_after_the_product(normal: Normal, same_bits: Check, dtype: mx.Dtype) -> None:
    matrix, _ = packed(normal(0, (24, 64), dtype), 4, 32)
    bias, x = normal(1, (24,), dtype), normal(2, (3, 64), dtype)
    same_bits(matrix.product(x) + bias, Linear(path="l", weight=matrix, bias=bias)(x))


def test_a_tied_head_is_the_product_with_the_table(normal: Normal, same_bits: Check) -> None:
    table = normal(0, (16, 64))
    x = normal(1, (1, 3, 64))
    same_bits(x @ table.T, Embedding(path="e", weight=table).as_head(x))
    quantised, dense = packed(table, 8, 32)
    same_bits(x @ dense.T, Embedding(path="e", weight=quantised).as_head(x))


def checkpoint(folder: Path, tensors: dict[str, mx.array], entry: object) -> Checkpoint:
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    quantization = Quantization.from_config({} if entry is None else {"quantization": entry})
    return Checkpoint.open(folder, dtype=mx.float32, quantization=quantization)


def stored(bits: int = 4, group_size: int = 32) -> dict[str, mx.array]:
    matrix, _ = packed(mx.ones((24, 64)), bits, group_size)
    return {"l.weight": matrix.weight, "l.scales": matrix.scales, "l.biases": matrix.biases}


def test_a_layer_is_packed_exactly_where_the_checkpoint_has_scales(tmp_path: Path) -> None:
    entry = {"bits": 4, "group_size": 32}
    source = checkpoint(tmp_path, {**stored(), "d.weight": mx.ones((24, 64)), "d.bias": mx.ones((24,))}, entry)
    layer = Linear.take(source, "l", inputs=64, outputs=24)
    assert isinstance(layer.weight, Packed)
    assert (layer.weight.format, layer.bias) == (Format(bits=4, group_size=32), None)
    dense = Linear.take(source, "d", inputs=64, outputs=24, bias=True)
    assert isinstance(dense.weight, mx.array)
    assert dense.bias is not None
    source.finish(dropped={})


@pytest.mark.parametrize("entry", [None, {"bits": 4, "group_size": 32, "l": False}])
def test_a_packed_module_that_the_config_does_not_describe_is_refused(tmp_path: Path, entry: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        Linear.take(checkpoint(tmp_path, stored(), entry), "l", inputs=64, outputs=24)
    assert str(caught.value) == (
        "l is packed but config.json does not say how\n"
        "  found  l.scales\n"
        "  next   add a quantization entry to config.json, or take the config that belongs to these weights"
    )


@pytest.mark.parametrize(("bits", "group_size", "tensor"), [(8, 32, "l.weight"), (4, 64, "l.scales")])
def test_a_format_that_is_not_that_of_the_weights_is_refused(
    tmp_path: Path, bits: int, group_size: int, tensor: str
) -> None:
    source = checkpoint(tmp_path, stored(), {"bits": bits, "group_size": group_size})
    with pytest.raises(CheckpointError, match=f"^tensor {tensor} has the wrong shape\n"):
        Linear.take(source, "l", inputs=64, outputs=24)


@pytest.mark.parametrize("part", ["weight", "biases"])
def test_a_packed_module_without_one_of_its_tensors_is_refused(tmp_path: Path, part: str) -> None:
    tensors = stored()
    del tensors[f"l.{part}"]
    with pytest.raises(CheckpointError, match=f"^the checkpoint has no tensor l.{part}\n"):
        Linear.take(checkpoint(tmp_path, tensors, {"bits": 4, "group_size": 32}), "l", inputs=64, outputs=24)


def test_a_missing_bias_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no tensor l\.bias\n"):
        Linear.take(checkpoint(tmp_path, {"l.weight": mx.ones((24, 64))}, None), "l", inputs=64, outputs=24, bias=True)


def test_a_width_that_no_group_divides_is_refused(tmp_path: Path) -> None:
    tensors = {
        "l.weight": mx.zeros((24, 6), dtype=mx.uint32),
        "l.scales": mx.ones((24, 1)),
        "l.biases": mx.ones((24, 1)),
    }
    with pytest.raises(CheckpointError):
        Linear.take(checkpoint(tmp_path, tensors, {"bits": 4, "group_size": 32}), "l", inputs=48, outputs=24)


# weights of small floats


every_float = pytest.mark.parametrize("mode", FLOATING)
UNIT_SCALE = {"mxfp4": 127, "nvfp4": 56, "mxfp8": 127}  # the byte that means 1.0


def packed_floats(matrix: mx.array, mode: str) -> Packed:
    bits, group = FLOATING[mode]
    weight, scales = mx.quantize(matrix, group_size=group, bits=bits, mode=mode)
    return Packed(weight=weight, scales=scales, biases=None, format=Format(bits=bits, group_size=group, mode=mode))


def decoded(matrix: Packed, *, scaled: bool = True) -> npt.NDArray[np.float32]:
    """What a matrix stands for, exactly; or its elements before their scale is applied."""
    form = matrix.format
    scales = matrix.scales if scaled else mx.full(matrix.scales.shape, UNIT_SCALE[form.mode], dtype=mx.uint8)
    return np.array(
        mx.dequantize(
            matrix.weight, scales, group_size=form.group_size, bits=form.bits, mode=form.mode, dtype=mx.float32
        )
    )


def product_by_groups(x_ND: mx.array, matrix: Packed) -> npt.NDArray[np.float32]:
    """Each group summed by itself without its scale, then scaled, then added; all rounded to x's dtype."""
    dtype, group = x_ND.dtype, matrix.format.group_size

    def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.array(mx.array(values).astype(dtype).astype(mx.float32))

    elements, values = decoded(matrix, scaled=False), decoded(matrix)
    divided = np.divide(values, elements, out=np.zeros_like(values), where=elements != 0)
    scales = divided.reshape(len(values), -1, group).max(axis=-1)
    x = np.array(x_ND.astype(mx.float32))
    total = np.zeros((len(x), len(values)), dtype=np.float32)
    for g in range(values.shape[-1] // group):
        within = np.zeros_like(total)
        for k in range(g * group, (g + 1) * group):
            within = rounded(within + rounded(x[:, k, None] * elements[None, :, k]))
        total = rounded(total + rounded(within * scales[None, :, g]))
    return total


@every_float
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_product_with_small_floats_sums_each_group_before_it_scales_it(
    normal: Normal, same_bits: Check, mode: str, dtype: mx.Dtype
) -> None:
    matrix, x = packed_floats(normal(1, (12, 128)), mode), normal(2, (3, 128), dtype)
    same_bits(mx.array(product_by_groups(x, matrix)).astype(dtype), matrix.product(x))


@every_float
def test_several_groups_of_small_floats_are_not_one_dense_sum(normal: Normal, other_bits: Check, mode: str) -> None:
    matrix, x = packed_floats(normal(1, (24, 128)), mode), normal(2, (5, 128))
    other_bits(x @ mx.array(decoded(matrix)).T, matrix.product(x))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_one_group_whose_scale_is_a_power_of_two_is_the_dense_sum(normal: Normal, same_bits: Check, mode: str) -> None:
    matrix, x = packed_floats(normal(1, (24, 32)), mode), normal(2, (5, 32))
    same_bits(x @ mx.array(decoded(matrix)).T, matrix.product(x))


@every_float
def test_rows_of_small_floats_are_exact_in_bfloat16(normal: Normal, same_bits: Check, mode: str) -> None:
    table = packed_floats(normal(1, (16, 64)), mode)
    ids = mx.array([[3, 3, 15], [0, 7, 2]])
    rows = Embedding(path="e", weight=table)(ids)
    assert rows.dtype == mx.bfloat16  # whatever the model computes in, as the oracle's embedding does
    same_bits(decoded(table)[np.array(ids)], np.array(rows.astype(mx.float32)))


def float_checkpoint(folder: Path, mode: str, **changes: mx.array | None) -> Checkpoint:
    matrix = packed_floats(mx.ones((24, 64)), mode)
    bits, group = FLOATING[mode]
    leaves = {"weight": matrix.weight, "scales": matrix.scales} | changes
    tensors = {f"l.{leaf}": array for leaf, array in leaves.items() if array is not None}
    return checkpoint(folder, tensors, {"bits": bits, "group_size": group, "mode": mode})


@every_float
def test_small_floats_keep_their_scales_as_bytes_and_have_no_biases(tmp_path: Path, mode: str) -> None:
    source = float_checkpoint(tmp_path, mode)
    layer = Linear.take(source, "l", inputs=64, outputs=24)
    source.finish(dropped={})
    assert isinstance(layer.weight, Packed)
    assert (layer.weight.weight.dtype, layer.weight.scales.dtype) == (mx.uint32, mx.uint8)
    assert (layer.weight.biases, layer.weight.format.mode) == (None, mode)


@every_float
def test_scales_that_are_no_bytes_are_refused(tmp_path: Path, mode: str) -> None:
    floats = mx.ones((24, 64 // FLOATING[mode][1]))
    with pytest.raises(CheckpointError) as caught:
        Linear.take(float_checkpoint(tmp_path, mode, scales=floats), "l", inputs=64, outputs=24)
    assert str(caught.value) == (
        "tensor l.scales has the wrong dtype\n"
        "  expected  mlx.core.uint8\n"
        "  found     mlx.core.float32\n"
        "  next      compare the quantization entry of config.json with the weights"
    )


@every_float
def test_packed_words_without_scales_are_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(CheckpointError, match=r"^tensor l\.weight has the wrong shape\n"):
        Linear.take(float_checkpoint(tmp_path, mode, scales=None), "l", inputs=64, outputs=24)


def test_words_that_are_floats_are_refused(tmp_path: Path) -> None:
    words = mx.ones((24, 64 * 4 // 32))
    with pytest.raises(
        CheckpointError, match=r"^tensor l\.weight has the wrong dtype\n  expected  mlx\.core\.uint32\n"
    ):
        Linear.take(float_checkpoint(tmp_path, "mxfp4", weight=words), "l", inputs=64, outputs=24)


@every_float
def test_biases_beside_small_floats_are_left_over(tmp_path: Path, mode: str) -> None:
    source = float_checkpoint(tmp_path, mode, biases=mx.zeros((24, 64 // FLOATING[mode][1])))
    Linear.take(source, "l", inputs=64, outputs=24)
    with pytest.raises(CheckpointError, match=r"\n  tensors  l\.biases\n"):
        source.finish(dropped={})


def test_affine_scales_that_are_bytes_are_refused(tmp_path: Path) -> None:
    tensors = stored() | {"l.scales": mx.ones((24, 2), dtype=mx.uint8)}
    with pytest.raises(CheckpointError, match=r"^tensor l\.scales has the wrong dtype\n  expected  a floating dtype\n"):
        Linear.take(checkpoint(tmp_path, tensors, {"bits": 4, "group_size": 32}), "l", inputs=64, outputs=24)
