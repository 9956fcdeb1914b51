"""Expert layers against a loop over tokens and their experts; sorting, packing and a bias change no bit that they must not."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import moe
from engine.activation import geglu, swiglu
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.linear import Packed
from engine.moe import SORTED_FROM, ExpertLinear, GatedExperts, weighted_sum
from engine.quantization import AFFINE_BITS, FLOATING, Format, Quantization
from engine.taps import watching

Check = Callable[..., None]
Normal = Callable[..., mx.array]

X, D, F = 5, 64, 96


def layer(normal: Normal, *, bias: bool = False, seed: int = 0) -> GatedExperts:
    def linear(number: int, outputs: int, inputs: int) -> ExpertLinear:
        return ExpertLinear(
            weight=normal(10 * seed + number, (X, outputs, inputs)) / 8,
            bias=normal(10 * seed + number + 5, (X, outputs)) if bias else None,
        )

    return GatedExperts(path="m", gate=linear(0, F, D), up=linear(1, F, D), down=linear(2, D, F), activation=swiglu)


def choices(seed: int, B: int, L: int, k: int) -> mx.array:
    """k different experts a token, in no order."""
    random = np.random.default_rng(seed)
    return mx.array([[random.permutation(X)[:k].tolist() for _ in range(L)] for _ in range(B)])


def dense(linear: ExpertLinear) -> mx.array:
    if not isinstance(linear.weight, Packed):
        return linear.weight
    packed, form = linear.weight, linear.weight.format
    return mx.dequantize(
        packed.weight, packed.scales, packed.biases, group_size=form.group_size, bits=form.bits, mode=form.mode
    ).astype(mx.float32)


def one_by_one(experts: GatedExperts, x_BLD: mx.array, chosen_BLk: mx.array) -> mx.array:
    """Every token by itself through plain products with the matrices of each of its experts."""

    def through(linear: ExpertLinear, x_D: mx.array, expert: int) -> mx.array:
        y = (x_D[None] @ dense(linear)[expert].T)[0]
        return y if linear.bias is None else y + linear.bias[expert]

    B, L, k = chosen_BLk.shape
    out = []
    for b, t, j in product(range(B), range(L), range(k)):
        x, expert = x_BLD[b, t], int(chosen_BLk[b, t, j].item())
        inner = experts.activation(through(experts.gate, x, expert), through(experts.up, x, expert))
        out.append(through(experts.down, inner, expert))
    return mx.stack(out).reshape(B, L, k, -1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("B", "L", "k"), [(1, 1, 1), (1, 1, 2), (2, 7, 2), (2, 16, 2), (1, 32, 3)])
def test_each_token_goes_through_its_experts_alone(
    *, normal: Normal, same_bits: Check, bias: bool, B: int, L: int, k: int
) -> None:
    experts, x, chosen = layer(normal, bias=bias), normal(99, (B, L, D)), choices(1, B, L, k)
    out = experts(x, chosen)
    assert out.shape == (B, L, k, D)
    same_bits(one_by_one(experts, x, chosen), out)


def test_tokens_are_sorted_from_the_documented_number_of_choices_on(
    normal: Normal, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    gather = mx.gather_mm

    def watched(*args: mx.array, sorted_indices: bool, **options: mx.array) -> mx.array:
        seen.append(sorted_indices)
        return gather(*args, sorted_indices=sorted_indices, **options)

    monkeypatch.setattr(mx, "gather_mm", watched)
    experts = layer(normal)
    assert SORTED_FROM == 64
    for L, k, is_sorted in ((63, 1, False), (64, 1, True), (31, 2, False), (32, 2, True)):
        experts(normal(0, (1, L, D)), choices(0, 1, L, k))
        assert seen == [is_sorted] * 3
        seen.clear()


@given(seed=st.integers(0, 2**32 - 1), L=st.integers(1, 40), k=st.integers(1, 4), bias=st.booleans())
@settings(max_examples=25, deadline=None)
def test_sorting_changes_no_bit(*, normal: Normal, same_bits: Check, seed: int, L: int, k: int, bias: bool) -> None:
    experts, x, chosen = layer(normal, bias=bias), normal(seed, (2, L, D)), choices(seed, 2, L, k)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moe, "SORTED_FROM", 1)
        in_order = experts(x, chosen)
        patched.setattr(moe, "SORTED_FROM", 10**9)
        as_they_come = experts(x, chosen)
    same_bits(as_they_come, in_order)


def packed(linear: ExpertLinear, form: Format) -> ExpertLinear:
    assert isinstance(linear.weight, mx.array)
    parts = mx.quantize(linear.weight, group_size=form.group_size, bits=form.bits, mode=form.mode)
    weight, scales, biases = parts if form.mode == "affine" else (*parts, None)
    return replace(linear, weight=Packed(weight=weight, scales=scales, biases=biases, format=form))


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("L", [3, 40])
def test_affine_experts_are_the_dequantised_ones(normal: Normal, same_bits: Check, bits: int, L: int) -> None:
    plain, form = layer(normal, bias=True), Format(bits=bits, group_size=32)
    experts = replace(plain, gate=packed(plain.gate, form), up=packed(plain.up, form), down=packed(plain.down, form))
    as_dense = replace(
        plain,
        gate=replace(plain.gate, weight=dense(experts.gate)),
        up=replace(plain.up, weight=dense(experts.up)),
        down=replace(plain.down, weight=dense(experts.down)),
    )
    x, chosen = normal(7, (1, L, D)), choices(7, 1, L, 2)
    same_bits(as_dense(x, chosen), experts(x, chosen))


@pytest.mark.parametrize("mode", FLOATING)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_experts_of_small_floats_are_packed_matrices_one_by_one(
    normal: Normal, same_bits: Check, mode: str, dtype: mx.Dtype
) -> None:
    bits, group = FLOATING[mode]
    linear = packed(layer(normal).gate, Format(bits=bits, group_size=group, mode=mode))
    assert isinstance(linear.weight, Packed)
    x, chosen = normal(7, (1, 6, D), dtype), choices(7, 1, 6, 2)
    out = linear(mx.expand_dims(x, (-2, -3)), chosen, sorted_experts=False).squeeze(-2)
    for t, j in product(range(6), range(2)):
        expert = int(chosen[0, t, j].item())
        alone = replace(linear.weight, weight=linear.weight.weight[expert], scales=linear.weight.scales[expert])
        same_bits(alone.product(x[0, t][None])[0], out[0, t, j])


def test_the_activation_gets_gate_and_up_in_this_order(normal: Normal, same_bits: Check, other_bits: Check) -> None:
    experts, x, chosen = layer(normal), normal(7, (1, 3, D)), choices(7, 1, 3, 2)
    other_bits(experts(x, chosen), replace(experts, gate=experts.up, up=experts.gate)(x, chosen))
    with_gelu = replace(experts, activation=geglu)
    other_bits(experts(x, chosen), with_gelu(x, chosen))
    same_bits(one_by_one(with_gelu, x, chosen), with_gelu(x, chosen))


@pytest.mark.parametrize("L", [3, 40])
def test_the_bias_is_that_of_the_expert(normal: Normal, other_bits: Check, L: int) -> None:
    experts, x, chosen = layer(normal, bias=True), normal(7, (1, L, D)), choices(7, 1, L, 2)
    for name in ("gate", "up", "down"):
        linear: ExpertLinear = getattr(experts, name)
        assert linear.bias is not None
        turned = replace(experts, **{name: replace(linear, bias=mx.roll(linear.bias, 1, axis=0))})
        other_bits(experts(x, chosen), turned(x, chosen))


@pytest.mark.parametrize("L", [3, 40])
def test_a_watcher_sees_the_outputs_of_all_choices_by_position(normal: Normal, same_bits: Check, L: int) -> None:
    seen: list[tuple[str, mx.array]] = []
    experts, x, chosen = layer(normal), normal(7, (1, L, D)), choices(7, 1, L, 2)
    with watching(lambda path, value: seen.append((path, value))):
        out = experts(x, chosen)
    assert [path for path, _ in seen] == ["m"]  # single experts have no position of their own
    assert seen[0][1].shape == (1, L, 2, D)
    same_bits(out, seen[0][1])


# from a checkpoint


def stacked(normal: Normal, *, bias: bool) -> dict[str, mx.array]:
    shapes = {"gate_proj": (X, F, D), "up_proj": (X, F, D), "down_proj": (X, D, F)}
    tensors = {f"m.{name}.weight": normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    if bias:
        tensors |= {f"m.{name}.bias": normal(9, shape[:2]) for name, shape in shapes.items()}
    return tensors


def opened(folder: Path, tensors: dict[str, mx.array]) -> Checkpoint:
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    entry = {"bits": 4, "group_size": 32}
    return Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization.from_config({"quantization": entry}))


def take(source: Checkpoint, *, bias: bool = False) -> GatedExperts:
    return GatedExperts.take(source, "m", experts=X, width=D, inner=F, activation=swiglu, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
def test_stacked_tensors_are_taken_by_name_and_all_of_them(
    tmp_path: Path, normal: Normal, same_bits: Check, bias: bool
) -> None:
    tensors = stacked(normal, bias=bias)
    source = opened(tmp_path, tensors)
    experts = take(source, bias=bias)
    source.finish(dropped={})
    for name, linear in (("gate_proj", experts.gate), ("up_proj", experts.up), ("down_proj", experts.down)):
        same_bits(tensors[f"m.{name}.weight"], linear.weight)
        assert (linear.bias is not None) == bias
        if linear.bias is not None:
            same_bits(tensors[f"m.{name}.bias"], linear.bias)


def test_each_projection_is_packed_by_itself(tmp_path: Path, normal: Normal) -> None:
    tensors = stacked(normal, bias=False)
    parts = mx.quantize(tensors["m.up_proj.weight"], group_size=32, bits=4)
    tensors |= dict(zip([f"m.up_proj.{leaf}" for leaf in ("weight", "scales", "biases")], parts, strict=True))
    source = opened(tmp_path, tensors)
    experts = take(source)
    source.finish(dropped={})
    assert isinstance(experts.up.weight, Packed)
    assert experts.up.weight.weight.shape == (X, F, D * 4 // 32)
    assert isinstance(experts.gate.weight, mx.array)


def test_another_number_of_experts_is_refused(tmp_path: Path, normal: Normal) -> None:
    tensors = stacked(normal, bias=False)
    tensors["m.down_proj.weight"] = tensors["m.down_proj.weight"][1:]
    with pytest.raises(CheckpointError) as caught:
        take(opened(tmp_path, tensors))
    assert str(caught.value) == (
        "tensor m.down_proj.weight has the wrong shape\n"
        "  expected  [5, 64, 96]\n"
        "  found     [4, 64, 96]\n"
        "  next      take the weights that belong to this config.json"
    )


# experts that the checkpoint keeps apart, and the sum over a token's experts


def apart(expert: int, name: str) -> str:
    return f"m.experts.{expert}.{name}"


def taken_apart(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    names = {f"{apart(i, name.split('.')[1])}.{name.split('.')[2]}": (name, i) for name in tensors for i in range(X)}
    return {new: tensors[name][i] for new, (name, i) in names.items()}


def test_experts_kept_apart_are_the_stacked_ones(tmp_path: Path, normal: Normal, same_bits: Check) -> None:
    tensors = stacked(normal, bias=False)
    source = opened(tmp_path, taken_apart(tensors))
    experts = GatedExperts.take(source, "m", experts=X, width=D, inner=F, activation=swiglu, apart=apart)
    source.finish(dropped={})
    for name, linear in (("gate_proj", experts.gate), ("up_proj", experts.up), ("down_proj", experts.down)):
        same_bits(tensors[f"m.{name}.weight"], linear.weight)


def test_packed_experts_kept_apart_are_refused(tmp_path: Path, normal: Normal) -> None:
    tensors = stacked(normal, bias=False)
    for name in ("gate_proj", "up_proj", "down_proj"):
        parts = mx.quantize(tensors[f"m.{name}.weight"], group_size=32, bits=4)
        tensors |= dict(zip([f"m.{name}.{leaf}" for leaf in ("weight", "scales", "biases")], parts, strict=True))
    source = opened(tmp_path, taken_apart(tensors))
    with pytest.raises(CheckpointError, match=r"^tensor m\.experts\.0\.gate_proj\.weight has the wrong shape\n"):
        GatedExperts.take(source, "m", experts=X, width=D, inner=F, activation=swiglu, apart=apart)


def test_stacked_experts_are_read_where_the_checkpoint_has_them_stacked(
    tmp_path: Path, normal: Normal, same_bits: Check
) -> None:
    tensors = stacked(normal, bias=False)
    source = opened(tmp_path, tensors)
    experts = GatedExperts.take(source, "m", experts=X, width=D, inner=F, activation=swiglu, apart=apart)
    source.finish(dropped={})
    same_bits(tensors["m.up_proj.weight"], experts.up.weight)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_sum_over_experts_is_in_the_wider_dtype_and_in_the_order_of_the_choice(
    normal: Normal, same_bits: Check, k: int, dtype: mx.Dtype
) -> None:
    outputs, weights = normal(1, (2, 3, k, 16), dtype), mx.abs(normal(2, (2, 3, k)))
    total = np.zeros((2, 3, 16), dtype=np.float32)
    for j in range(k):
        total = total + np.array(outputs[:, :, j].astype(mx.float32)) * np.array(weights[:, :, j, None])
    same_bits(mx.array(total).astype(dtype), weighted_sum(outputs, weights))
