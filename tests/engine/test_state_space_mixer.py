"""The state-space layer around its scan: sizes, the gated norm in all its forms, both shapes of the filters, and seams."""

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.recurrent import RecurrentCache
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.quantization import Quantization
from engine.state_space_mixer import STATE_SLOTS, OutputNorm, ScanHeads, StateSpaceMixer
from engine.taps import watching

Check = Callable[..., None]
Normal = Callable[..., mx.array]
HEADS = ScanHeads(heads=4, head_width=8, groups=2, state_width=6, kernel=4)
WIDTH = 16


@pytest.fixture
def mixer(tmp_path: Path, normal: Normal) -> Callable[..., StateSpaceMixer]:
    """Write a layer's tensors, with changes, and take it."""

    def make(changes: dict[str, mx.array] | None = None, *, gated_norm: bool = True) -> StateSpaceMixer:
        tensors = {
            "m.in_proj.weight": normal(0, (HEADS.inner + HEADS.channels + 4, WIDTH)) / 4,
            "m.conv1d.weight": normal(1, (HEADS.channels, 4, 1)),
            "m.conv1d.bias": normal(2, (HEADS.channels,)),
            "m.dt_bias": normal(3, (4,)),
            "m.A_log": normal(4, (4,)),
            "m.D": normal(5, (4,)),
            "m.out_proj.weight": normal(6, (WIDTH, HEADS.inner)) / 4,
        }
        folder = Path(mkdtemp(dir=tmp_path))  # arrays are read when they are needed: one folder a layer
        mx.save_safetensors(str(folder / "model.safetensors"), {**tensors, **(changes or {})})
        checkpoint = Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization())
        taken = StateSpaceMixer.take(
            checkpoint,
            "m",
            heads=HEADS,
            width=WIDTH,
            limits=(0.0, math.inf),
            norm=OutputNorm(path="m.norm", weight=normal(7, (HEADS.inner,)), eps=1e-6) if gated_norm else None,
            in_bias=False,
            conv_bias=True,
            out_bias=False,
        )
        checkpoint.finish(dropped={})
        return taken

    return make


def test_sizes_follow_from_heads_and_groups() -> None:
    assert (HEADS.inner, HEADS.shared, HEADS.channels) == (32, 12, 56)


@pytest.mark.parametrize("changes", [{"groups": 3}, {"groups": 0}, {"heads": 0}, {"kernel": 0}, {"state_width": 0}])
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int]) -> None:
    sizes = {"heads": 4, "head_width": 8, "groups": 2, "state_width": 6, "kernel": 4, **changes}
    with pytest.raises(ConfigError) as caught:
        ScanHeads(**sizes).check()
    assert str(caught.value) == (
        "the heads of the scan do not fit together\n"
        f"  heads        {sizes['heads']}\n"
        f"  head width   {sizes['head_width']}\n"
        f"  groups       {sizes['groups']}\n"
        f"  state width  {sizes['state_width']}\n"
        f"  kernel       {sizes['kernel']}\n"
        "  next         mend config.json"
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_norm_is_of_what_is_gated_unless_the_gate_comes_after(
    normal: Normal, same_bits: Check, other_bits: Check, dtype: mx.Dtype
) -> None:
    y, gate, weight = (normal(seed, shape, dtype) for seed, shape in enumerate([(1, 3, 8), (1, 3, 8), (8,)]))
    silu = gate * mx.sigmoid(gate)
    first = OutputNorm(path="n", weight=weight, eps=1e-6)(y, gate)
    after = OutputNorm(path="n", weight=weight, eps=1e-6, gate_first=False)(y, gate)
    same_bits(mx.fast.rms_norm(silu * y, weight, 1e-6), first)
    same_bits(silu * mx.fast.rms_norm(y, weight, 1e-6), after)
    other_bits(first, after)


def test_groups_are_normalised_by_themselves_and_the_weight_comes_after(
    normal: Normal, same_bits: Check, other_bits: Check
) -> None:
    y, gate, weight = (normal(seed, shape, mx.bfloat16) for seed, shape in enumerate([(1, 3, 8), (1, 3, 8), (8,)]))
    grouped = OutputNorm(path="n", weight=weight, eps=1e-6, group=4)(y, gate)
    silu = gate * mx.sigmoid(gate)
    halves = [mx.fast.rms_norm((silu * y)[..., at], None, 1e-6) for at in (slice(4), slice(4, 8))]
    same_bits(weight * mx.concatenate(halves, axis=-1), grouped)
    other_bits(OutputNorm(path="n", weight=weight, eps=1e-6)(y, gate), grouped)


def test_filters_as_on_the_hub_are_the_converted_ones(
    mixer: Callable[..., StateSpaceMixer], normal: Normal, same_bits: Check
) -> None:
    x, cache = normal(8, (1, 5, WIDTH)), RecurrentCache.empty(STATE_SLOTS)
    converted, _ = mixer()(x, cache)
    hub, _ = mixer({"m.conv1d.weight": mx.contiguous(normal(1, (HEADS.channels, 4, 1)).swapaxes(1, 2))})(x, cache)
    same_bits(converted, hub)


def test_filters_of_another_shape_are_refused(mixer: Callable[..., StateSpaceMixer], normal: Normal) -> None:
    with pytest.raises(CheckpointError, match=r"^tensor m\.conv1d\.weight has the wrong shape\n"):
        mixer({"m.conv1d.weight": normal(1, (HEADS.channels, 3, 1))})


def test_two_calls_see_what_one_sees(mixer: Callable[..., StateSpaceMixer], normal: Normal) -> None:
    layer, x = mixer(), normal(8, (1, 9, WIDTH))
    whole, at_once = layer(x, RecurrentCache.empty(STATE_SLOTS))
    first, between = layer(x[:, :4], RecurrentCache.empty(STATE_SLOTS))
    second, after = layer(x[:, 4:], between)
    assert mx.abs(whole - mx.concatenate([first, second], axis=1)).max().item() < 1e-5  # cut scans round otherwise
    assert (at_once.offset, between.offset, after.offset) == (9, 4, 9)
    assert [array.shape for array in after.arrays] == [(1, 3, HEADS.channels), (1, 4, 8, 6)]


def test_without_a_norm_the_gate_is_all(mixer: Callable[..., StateSpaceMixer], normal: Normal) -> None:
    seen: dict[str, Any] = {}
    with watching(seen.__setitem__):
        mixer(gated_norm=False)(normal(8, (1, 2, WIDTH)), RecurrentCache.empty(STATE_SLOTS))
    assert list(seen) == ["m.in_proj", "m.conv1d", "m.out_proj", "m"]
