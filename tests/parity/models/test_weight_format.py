"""Packed weights stand for the values that were packed, as near as their format allows, and mlx reads them so.

Bounds are exact: every stored scale, bias and element is a float of at most eleven significant bits, so what a code stands
for is exact in float64, and which code is the nearest is decided there.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.quantization import AFFINE_BITS, AFFINE_GROUPS, FLOATING
from parity.models.tiny import MIXED, draw
from parity.models.weight_format import E2M1, FORMATS, WeightFormat, _e4m3_values, pack_words, packed
from parity.tensor import Tensor

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

AFFINE = [WeightFormat(mode="affine", bits=bits, group_size=group) for bits in AFFINE_BITS for group in AFFINE_GROUPS]
SMALL_FLOATS = [WeightFormat(mode=mode, bits=bits, group_size=group) for mode, (bits, group) in FLOATING.items()]


def name_of(form: WeightFormat) -> str:
    return f"{form.mode}-b{form.bits}-g{form.group_size}"


every_affine = pytest.mark.parametrize("form", AFFINE, ids=name_of)
every_small_float = pytest.mark.parametrize("form", SMALL_FLOATS, ids=name_of)
every_form = pytest.mark.parametrize("form", AFFINE + SMALL_FLOATS, ids=name_of)


def drawn(rows: int = 6, columns: int = 128, seed: int = 0) -> Floats:
    """Values as tiny snapshots have them: multiples of 2**-16."""
    return (0.125 * draw(seed, "weights", rows * columns)).reshape(rows, columns).astype(np.float32)


def to_mlx(tensor: Tensor) -> mx.array:
    words = mx.array(tensor.bits())
    return words.view(mx.bfloat16).astype(mx.float32) if tensor.dtype == "BF16" else words


def read_by_mlx(parts: dict[str, Tensor], form: WeightFormat) -> Floats:
    """What mlx makes of packed words, in float32."""
    biases = to_mlx(parts["biases"]) if form.mode == "affine" else None
    dtype = None if form.mode == "affine" else mx.float32
    return np.array(
        mx.dequantize(
            to_mlx(parts["weight"]),
            to_mlx(parts["scales"]),
            biases,
            group_size=form.group_size,
            bits=form.bits,
            mode=form.mode,
            dtype=dtype,
        )
    )


def unpacked(words: npt.NDArray[np.uint32], bits: int) -> list[list[int]]:
    """Codes of each row, read off the row's words as one long Python integer."""
    out = []
    for row in words.reshape(-1, words.shape[-1]):
        stream = sum(int(word) << (32 * i) for i, word in enumerate(row))
        out.append([(stream >> (bits * i)) % 2**bits for i in range(32 * len(row) // bits)])
    return out


# words


@given(bits=st.integers(1, 8), rows=st.integers(1, 3), data=st.data())
def test_words_are_filled_from_the_lowest_bit_up(bits: int, rows: int, data: st.DataObject) -> None:
    codes: Codes = data.draw(arrays(np.uint8, (rows, 64), elements=st.integers(0, 2**bits - 1)))
    words = pack_words(codes, bits)
    assert (words.dtype, words.shape) == (np.dtype("<u4"), (rows, 2 * bits))
    assert unpacked(words, bits) == codes.tolist()


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_mlx_reads_every_code_of_every_width(bits: int) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128) & np.uint8(2**bits - 1)
    one, zero = mx.ones((2, 4)), mx.zeros((2, 4))
    read = mx.dequantize(mx.array(pack_words(codes, bits)), one, zero, group_size=32, bits=bits)
    assert np.array(read).tolist() == codes.tolist()


# affine


def affine_grid(parts: dict[str, Tensor], form: WeightFormat) -> tuple[Any, Any]:
    """Bias and scale of every element's group, exact."""
    scales, biases = (np.repeat(parts[leaf].values(), form.group_size, axis=-1) for leaf in ("scales", "biases"))
    return biases, scales


@every_affine
def test_mlx_reads_an_affine_weight_as_bias_plus_scale_times_code(form: WeightFormat) -> None:
    parts = packed(drawn(), form)
    biases, scales = affine_grid(parts, form)
    codes = np.array(unpacked(parts["weight"].bits().astype(np.uint32), form.bits))
    exact = biases + scales * codes  # float64 holds it: 8 + 8 bits, and a bias near the same binade
    assert read_by_mlx(parts, form).tobytes() == exact.astype(np.float32).tobytes()


@every_affine
def test_an_affine_weight_is_within_half_a_step_where_its_grid_reaches(form: WeightFormat) -> None:
    """Scale and bias are bfloat16, each off by at most 2**-8 of itself, so the grid may begin or end that much too early."""
    values = drawn().astype(np.float64)
    parts = packed(drawn(), form)
    biases, scales = affine_grid(parts, form)
    read = biases + scales * np.array(unpacked(parts["weight"].bits().astype(np.uint32), form.bits))
    top = biases + scales * (2**form.bits - 1)
    inside = (biases <= values) & (values <= top)
    # the quotient is rounded once in float32 before it is rounded to a code: 2**-24 of at most 255 steps
    assert (np.abs(read - values) <= scales * (0.5 + 2.0**-16))[inside].all()
    assert (read == np.where(values < biases, biases, top))[~inside].all()
    groups = values.reshape(6, -1, form.group_size)
    low, high = (np.repeat(ends, form.group_size, axis=-1) for ends in (groups.min(axis=-1), groups.max(axis=-1)))
    assert (np.abs(read - values) <= 2.0**-8 * (np.abs(low) + (high - low)))[~inside].all()
    assert inside.mean() > 0.9


@every_affine
def test_more_than_half_the_codes_of_a_width_are_used(form: WeightFormat) -> None:
    codes = unpacked(packed(drawn(rows=64), form)["weight"].bits().astype(np.uint32), form.bits)
    assert len({code for row in codes for code in row}) > 2 ** (form.bits - 1)


# small floats


def test_the_table_of_four_bit_floats_is_what_mlx_decodes() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), 2).reshape(1, 32)
    read = mx.dequantize(
        mx.array(pack_words(codes, 4)),
        mx.full((1, 1), 127, dtype=mx.uint8),
        group_size=32,
        bits=4,
        mode="mxfp4",
        dtype=mx.float32,
    )
    expected = np.concatenate([E2M1, -E2M1])  # minus zero included
    assert np.array(read).reshape(2, 16).tobytes() == np.stack([expected, expected]).tobytes()


def test_the_table_of_eight_bit_floats_is_what_mlx_decodes() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    read = mx.dequantize(
        mx.array(pack_words(codes, 8)),
        mx.full((8, 1), 127, dtype=mx.uint8),
        group_size=32,
        bits=8,
        mode="mxfp8",
        dtype=mx.float32,
    )
    table = _e4m3_values()
    halves = np.array(read).reshape(2, 128)
    assert halves[0, :127].tobytes() == table.tobytes()
    assert halves[1, :127].tobytes() == (-table).tobytes()  # code 127 is no number and is never written
    assert table[126] == 448


def test_the_scales_of_nvfp4_are_eight_bit_floats() -> None:
    ones = pack_words(np.full((127, 32), 2, dtype=np.uint8), 4)  # code 2 is 1.0
    scales = mx.broadcast_to(mx.arange(127).astype(mx.uint8)[:, None], (127, 2))
    read = mx.dequantize(mx.array(ones), scales, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32)
    assert np.array(read)[:, 0].tobytes() == _e4m3_values().tobytes()


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_the_scales_of_the_mx_formats_are_powers_of_two(mode: str) -> None:
    bits, group = FLOATING[mode]
    one = {"mxfp4": 2, "mxfp8": 56}[mode]  # the code of 1.0
    scales = np.arange(1, 255, dtype=np.uint8).reshape(-1, 1)
    words = mx.array(pack_words(np.full((254, group), one, dtype=np.uint8), bits))
    read = mx.dequantize(words, mx.array(scales), group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    assert np.array(read)[:, :1].tolist() == np.ldexp(np.float32(1), scales.astype(int) - 127).tolist()


def stored_grid(parts: dict[str, Tensor], form: WeightFormat) -> tuple[Any, Any]:
    """The scale of every element's group, and the magnitudes that an element can have before it."""
    bytes_ = parts["scales"].bits().astype(int)
    scales = _e4m3_values().astype(np.float64)[bytes_] if form.mode == "nvfp4" else np.ldexp(1.0, bytes_ - 127)
    magnitudes = _e4m3_values() if form.mode == "mxfp8" else E2M1
    return np.repeat(scales, form.group_size, axis=-1), magnitudes.astype(np.float64)


def assert_nearest(values: Floats, form: WeightFormat) -> None:
    parts = packed(values, form)
    read, exact = read_by_mlx(parts, form).astype(np.float64), values.astype(np.float64)
    scales, magnitudes = stored_grid(parts, form)
    grid = scales[..., None] * np.concatenate([-magnitudes, magnitudes])
    best = np.abs(grid - exact[..., None]).min(axis=-1)
    # dividing by a power of two is exact; an nvfp4 scale has four bits, and its quotient is rounded once
    slack = 2.0**-22 * np.abs(exact) if form.mode == "nvfp4" else 0.0
    assert (np.abs(read - exact) <= best + slack).all()
    assert (np.signbit(read) == np.signbit(exact)).all()


@every_small_float
def test_a_small_float_is_the_nearest_that_its_scale_allows(form: WeightFormat) -> None:
    assert_nearest(drawn(), form)


@every_small_float
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_values_become_the_nearest_small_floats_with_their_signs(form: WeightFormat, data: st.DataObject) -> None:
    steps = data.draw(arrays(np.int32, (2, 64), elements=st.integers(-(2**17), 2**17)))
    assert_nearest((steps / 2.0**16).astype(np.float32), form)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("largest", [0.75, 1.0, 1.5, 3.0, 6.0, 6.0001, 448.0, 449.0])
def test_the_largest_of_a_group_is_never_cut_off(mode: str, largest: float) -> None:
    bits, group = FLOATING[mode]
    form = WeightFormat(mode=mode, bits=bits, group_size=group)
    values = np.full((1, group), largest, dtype=np.float32)
    parts = packed(values, form)
    top = 6 if mode == "mxfp4" else 448
    scale = float(np.ldexp(1.0, int(parts["scales"].bits()[0, 0]) - 127))
    assert largest <= top * scale < 2 * np.float32(largest)  # the least power of two that reaches it
    assert_nearest(values, form)


def test_a_tie_goes_to_the_smaller_magnitude() -> None:
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, :4] = 6.0, 5.0, -2.5, 0.25
    assert read_by_mlx(packed(values, FORMATS["mxfp4"]), FORMATS["mxfp4"])[0, :4].tolist() == [6.0, 4.0, -2.0, 0.0]


# all formats


@every_form
def test_a_group_of_zeros_stays_zero(form: WeightFormat) -> None:
    values = drawn(rows=2)
    values[0, : form.group_size] = 0
    read = read_by_mlx(packed(values, form), form)
    assert read[0, : form.group_size].tobytes() == bytes(4 * form.group_size)
    assert np.isfinite(read).all()


@every_form
def test_words_depend_on_nothing_but_the_values(form: WeightFormat) -> None:
    values = drawn()
    expected = packed(values, form)
    assert packed(np.asfortranarray(values), form) == expected
    assert packed(np.repeat(values, 2, axis=0)[::2], form) == expected
    stack = packed(np.stack([values, values[::-1]]), form)
    for leaf, tensor in expected.items():
        upright, turned = stack[leaf].bits()
        assert upright.tolist() == tensor.bits().tolist()
        assert turned.tolist() == tensor.bits()[::-1].tolist()


@every_form
def test_a_group_depends_on_its_own_values_alone(form: WeightFormat) -> None:
    values = drawn()
    changed = values.copy()
    changed[:, form.group_size :] *= np.float32(3)
    changed[1:] += np.float32(0.5)
    one, other = packed(values, form), packed(changed, form)
    words = form.group_size * form.bits // 32
    assert one["weight"].bits()[0, :words].tolist() == other["weight"].bits()[0, :words].tolist()
    for leaf in one.keys() - {"weight"}:
        assert one[leaf].bits()[0, 0] == other[leaf].bits()[0, 0]


@every_form
def test_leaves_have_the_dtypes_and_shapes_that_mlx_expects(form: WeightFormat) -> None:
    leaves = {leaf: (tensor.dtype, tensor.shape) for leaf, tensor in packed(drawn(), form).items()}
    groups = (6, 128 // form.group_size)
    scale = "BF16" if form.mode == "affine" else "U8"
    expected = {"weight": ("U32", (6, 128 * form.bits // 32)), "scales": (scale, groups)}
    assert leaves == expected | ({"biases": ("BF16", groups)} if form.mode == "affine" else {})


def test_every_named_format_and_every_one_of_the_mixture_is_one_that_mlx_knows() -> None:
    known = dict.fromkeys(AFFINE + SMALL_FLOATS)
    assert all(form in known for form in FORMATS.values())
    assert all(form is None or form in known for form in MIXED)
    assert {form.bits for form in MIXED if form} == set(AFFINE_BITS)
    assert None in MIXED
