"""lfm2: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine import gated_convolution, grouped_attention
from engine.errors import ConfigError
from engine.families import lfm2
from engine.families.lfm2 import FIXED, Config
from engine.gated_convolution import GatedConvolution
from engine.model import open_model
from engine.short_convolution import ShortConvolution
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.planted_norm import plant_norm
from tests.engine.families.tiny_snapshot import logits_of, raw_config

TAPS = "lfm2-tiny/f32/fp/forced/p40-taps-tail-split"
CONV = "model.layers.0.conv"
ATTENTION = "model.layers.1.self_attn"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("lfm2-tiny")


def test_filters_as_on_the_hub_are_the_converted_ones(same_bits: Callable[..., None]) -> None:
    same_bits(logits_of("lfm2-tiny"), logits_of("lfm2-hub-tiny"))


def test_a_convolution_remembers_a_window_and_attention_all() -> None:
    model = open_model(ensure_snapshot("lfm2-tiny").path, dtype="f32")
    caches = model.make_caches()
    assert [cache.kind for cache in caches] == ["arrays-1", "plain", "arrays-1", "plain"]
    _, (first, *_) = model.hidden(mx.array([[1, 2, 3, 4, 5]]), caches)
    assert [array.shape for array in first.arrays] == [(1, 2, 256)]
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


@pytest.mark.parametrize(
    ("changes", "inner"),
    [
        ({}, 192),  # 2/3 of 256 is 170, up to a multiple of 64
        ({"block_multiple_of": 1}, 170),
        ({"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 1}, 255),
        ({"block_ffn_dim_multiplier": None}, 192),
        ({"block_auto_adjust_ff_dim": False}, 256),
        ({"block_ff_dim": None, "intermediate_size": 300, "block_multiple_of": 1}, 200),
    ],
)
def test_the_inner_width_follows_from_the_config(raw: dict[str, Any], changes: dict[str, Any], inner: int) -> None:
    assert Config.read({**raw, **changes}).inner == inner


@pytest.mark.parametrize("changes", [{"layer_types": None, "full_attn_idxs": [1, 3]}, {"full_attn_idxs": [3, 1]}, {}])
def test_layers_that_attend_are_named_or_numbered(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    config = Config.read({**raw, **changes})
    assert [config.attends(layer) for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["conv", "full_attention"]},
        {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
        {"full_attn_idxs": [1]},
        {"layer_types": None, "full_attn_idxs": [4]},
    ],
)
def test_layers_that_are_not_clear_are_refused(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    wrong = {**raw, **changes}
    with pytest.raises(ConfigError) as caught:
        Config.read(wrong)
    assert str(caught.value) == (
        "config.json does not say which layers attend\n"
        "  num hidden layers  4\n"
        f"  layer types        {', '.join(wrong['layer_types'] or ()) or 'absent'}\n"
        f"  full attn idxs     {wrong.get('full_attn_idxs')}\n"
        "  known              conv, full_attention\n"
        "  next               name every layer in layer_types, or list those that attend in full_attn_idxs"
    )


def test_widths_that_do_not_fit_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "block_dim": 128})
    assert str(caught.value) == (
        "the widths of a block do not fit together\n"
        "  hidden size        256\n"
        "  block dim          128\n"
        "  block ff dim       256\n"
        "  block multiple of  64\n"
        "  conv L cache       3\n"
        "  next               mend config.json"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("block_use_swiglu", False), ("tie_embedding", False), ("tie_word_embeddings", False)]
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"lfm2 computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_convolution_that_forgets_is_found_there(monkeypatch: Plant) -> None:
    right = ShortConvolution.__call__
    monkeypatch.setattr(ShortConvolution, "__call__", lambda self, x, _state, _ends=None: right(self, x, None))
    assert found(TAPS) == ("DIFFERENT", f"{CONV}.conv")


@needs_goldens
def test_gates_in_each_others_place_are_found_in_the_convolution(monkeypatch: Plant) -> None:
    class Swapped:
        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

        @staticmethod
        def split(array: mx.array, parts: int, axis: int) -> list[mx.array]:
            first, second, x = mx.split(array, parts, axis=axis)
            return [second, first, x]

    monkeypatch.setattr(gated_convolution, "mx", Swapped())
    assert found(TAPS) == ("DIFFERENT", f"{CONV}.conv")


@needs_goldens
def test_a_second_gate_left_out_is_found_in_the_projection(monkeypatch: Plant) -> None:
    def ungated(self: GatedConvolution, x: mx.array, cache: Any) -> Any:
        first, _, inner = mx.split(self.into(x), 3, axis=-1)
        filtered, window = self.convolution(first * inner, cache.state[0])
        return tap(self.path, self.out(filtered)), cache.advanced(window, by=x.shape[1])

    monkeypatch.setattr(GatedConvolution, "__call__", ungated)
    assert found(TAPS) == ("DIFFERENT", f"{CONV}.out_proj")


@needs_goldens
def test_a_rope_base_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = lfm2.make_rope
    monkeypatch.setattr(lfm2, "make_rope", lambda width, *, base: right(width, base=base * 1.001))
    assert found(TAPS) == ("DIFFERENT", f"{ATTENTION}.out_proj")


@needs_goldens
def test_another_scale_of_the_scores_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = grouped_attention.attend
    monkeypatch.setattr(
        grouped_attention, "attend", lambda *args, scale, mask: right(*args, scale=scale * (1 + 2**-20), mask=mask)
    )
    assert found(TAPS) == ("DIFFERENT", f"{ATTENTION}.out_proj")


@needs_goldens
@pytest.mark.parametrize(
    "path",
    [f"{ATTENTION}.q_layernorm", f"{ATTENTION}.k_layernorm", "model.layers.0.operator_norm", "model.layers.0.ffn_norm"],
)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _norm, x: x, id="skipped"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, norm.eps * 2), id="eps"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, 1 + norm.weight, norm.eps), id="offset"),
    ],
)
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, path: str, change: Callable[..., mx.array]) -> None:
    plant_norm(monkeypatch, path, change)
    assert found(TAPS) == ("DIFFERENT", path)
