"""A laid-out matrix loses nothing, keeps bfloat16 in two bytes, and leaves to mlx what it does not cover."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.kernels import layout
from engine.kernels.arena import LINE
from engine.kernels.blocks import address_of, blocks_of, rows_of
from engine.kernels.driver import SMALL_FLOATS, Driver, Form
from engine.kernels.layout import supported
from engine.kernels.matrix import FastMatrix, plain_product
from engine.kernels.team import Team
from engine.kernels.verify import DTYPES, Probe, packed, small_floats
from engine.linear import Packed
from engine.quantization import Format

Same = Callable[[Any, Any], None]
Normal = Callable[..., mx.array]


@pytest.fixture
def fast(driver: Callable[[Form], Driver]) -> Callable[[mx.array | Packed], FastMatrix]:
    return lambda weight: FastMatrix(driver=driver, team=Team(threads=2), plain=weight)


def weight_of(form: Form, normal: Normal, outputs: int = 67) -> mx.array | Packed:
    dtype = DTYPES[form.stored]
    if form.bits is None:
        return normal(1, (outputs, 96), dtype)
    probe = Probe(rows=1, inner=96, outputs=outputs)
    if form.mode in SMALL_FLOATS:
        return small_floats(np.random.default_rng(3), probe, form.mode)
    return packed(np.random.default_rng(3), probe, form.bits, lambda *shape: normal(2, shape, dtype))


def test_the_layout_gives_the_matrix_back(form: Form, fast: Any, normal: Normal, same_bits: Same) -> None:
    weight = weight_of(form, normal)
    matrix = fast(weight)
    matrix.product(normal(0, (1, 96), DTYPES[form.stored]))
    assert matrix.plain is None
    restored = matrix.restored()
    if isinstance(weight, Packed):
        same_words(weight.weight, restored.weight)
        if form.mode in SMALL_FLOATS:
            same_words(weight.scales, restored.scales)
            assert weight.biases is restored.biases is None
        else:
            same_bits(weight.scales, restored.scales)
            same_bits(weight.biases, restored.biases)
        assert restored.format == weight.format
    else:
        same_bits(weight, restored)


def same_words(expected: mx.array, actual: mx.array) -> None:
    assert expected.shape == actual.shape
    assert (np.array(expected) == np.array(actual)).all()


def test_batches_and_views_are_multiplied_in_place(form: Form, fast: Any, normal: Normal, same_bits: Same) -> None:
    weight, dtype = weight_of(form, normal), DTYPES[form.stored]
    matrix = fast(weight)
    for x in (
        normal(0, (2, 3, 96), dtype),
        normal(0, (3, 2, 96), dtype).swapaxes(0, 1),
        normal(0, (4, 192), dtype)[:, ::2],
        mx.broadcast_to(normal(0, (1, 96), dtype), (3, 96)),
        normal(0, (96,), dtype)[None],
    ):
        same_bits(plain_product(x, weight, None), matrix.product(x))


def test_a_dense_bias_is_added_before_rounding_and_a_packed_one_after(
    form: Form, fast: Any, normal: Normal, same_bits: Same
) -> None:
    weight, dtype = weight_of(form, normal), DTYPES[form.stored]
    x, bias = normal(0, (5, 96), dtype), normal(4, (67,), dtype)
    same_bits(plain_product(x, weight, bias), fast(weight).product(x, bias))


def test_float32_weights_that_are_bfloat16_take_two_bytes(fast: Any, normal: Normal, same_bits: Same) -> None:
    weight = normal(0, (64, 32), mx.bfloat16).astype(mx.float32)
    x, matrix = normal(1, (3, 32)), fast(weight)
    same_bits(x @ weight.T, matrix.product(x))
    assert matrix._laid.form == Form(stored="bf16")
    assert matrix._laid.words.nbytes == 64 * 32 * 2
    same_bits(weight, matrix.restored())


def test_one_low_bit_anywhere_keeps_float32_weights_in_four(fast: Any, normal: Normal, same_bits: Same) -> None:
    values = np.array(normal(0, (64, 32), mx.bfloat16).astype(mx.float32))
    values.view(np.uint32)[63, 31] |= 1
    x, matrix = normal(1, (3, 32)), fast(mx.array(values))
    same_bits(x @ mx.array(values).T, matrix.product(x))
    assert matrix._laid.form == Form(stored="f32")


def test_inputs_of_another_dtype_are_left_to_mlx(fast: Any, normal: Normal, same_bits: Same) -> None:
    weight = normal(0, (64, 32), mx.bfloat16)
    matrix = fast(weight)
    for dtype in (mx.bfloat16, mx.float32, mx.float16):
        x = normal(1, (2, 32), dtype)
        same_bits(plain_product(x, weight, None), matrix.product(x))


def test_no_rows_give_no_rows(fast: Any, normal: Normal) -> None:
    y = fast(normal(0, (64, 32))).product(mx.zeros((0, 32)))
    assert (y.shape, y.dtype) == ((0, 64), mx.float32)


def test_what_has_no_compiled_product_is_not_supported(normal: Normal) -> None:
    words = mx.zeros((8, 8), mx.uint32)
    floats = mx.zeros((8, 2))
    no_bytes = Packed(
        weight=words, scales=mx.zeros((8, 2)), biases=None, format=Format(bits=4, group_size=32, mode="mxfp4")
    )
    stacked = Packed(
        weight=words[None],
        scales=floats[None],
        biases=floats[None],
        format=Format(bits=4, group_size=32, mode="affine"),
    )
    for weight in (no_bytes, stacked, normal(0, (2, 3, 4)), words, object()):
        assert supported(weight) is None
    assert supported(normal(0, (2, 3))) is not None


def test_float16_needs_a_cpu_that_converts_it(normal: Normal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported(normal(0, (2, 3), mx.float16)) is not None
    monkeypatch.setattr(layout, "has_half_precision", lambda: False)
    assert supported(normal(0, (2, 3), mx.float16)) is None
    assert supported(normal(0, (2, 3), mx.bfloat16)) is not None


@pytest.mark.parametrize("mode", SMALL_FLOATS)
def test_small_floats_are_laid_out_once_for_activations_of_every_dtype(
    mode: str, fast: Any, normal: Normal, same_bits: Same
) -> None:
    weight = small_floats(np.random.default_rng(5), Probe(rows=1, inner=64, outputs=40), mode)
    matrix = fast(weight)
    for dtype in (mx.float32, mx.bfloat16, mx.float16, mx.float32):
        x = normal(1, (3, 64), dtype)
        same_bits(weight.product(x), matrix.product(x))
    laid = matrix.laid()
    assert laid.at(mx.bfloat16, "bf16").words is laid.words
    assert laid.at(mx.bfloat16, "bf16") is laid.at(mx.bfloat16, "bf16")


def test_a_product_that_was_not_proved_is_left_to_mlx(normal: Normal, same_bits: Same) -> None:
    weight = small_floats(np.random.default_rng(5), Probe(rows=1, inner=64, outputs=40), "mxfp4")
    matrix = FastMatrix(driver={}.get, team=Team(threads=1), plain=weight)
    x = normal(1, (3, 64), mx.float16)
    same_bits(weight.product(x), matrix.product(x))


def test_blocks_begin_on_a_line_of_the_cache(form: Form, fast: Any, normal: Normal) -> None:
    laid = fast(weight_of(form, normal)).laid()
    assert address_of(laid.words) % LINE == 0
    assert (rows_of(blocks_of(np.arange(70).reshape(7, 10), 4), 7) == np.arange(70).reshape(7, 10)).all()
