"""smollm3: which layers rotate, what it refuses, and that planted faults are seen where they begin."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.families import smollm3
from engine.families.smollm3 import Config
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "smollm3-tiny/f32/fp/forced/p40-taps-tail-split"
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("smollm3-tiny")


def rotated(config: Config) -> list[bool]:
    return [config.rotates(layer) for layer in range(config.num_hidden_layers)]


def test_every_fourth_layer_does_not_rotate(raw: Mapping[str, Any]) -> None:
    assert rotated(Config.read(raw)) == [True, True, True, False]
    assert rotated(Config.read({**raw, "no_rope_layer_interval": 2})) == [True, False, True, False]


def test_a_list_of_layers_goes_before_the_interval(raw: Mapping[str, Any]) -> None:
    assert rotated(Config.read({**raw, "no_rope_layers": [0, 1, 1, 1]})) == [False, True, True, True]


def test_every_layer_keeps_every_position() -> None:
    model = open_model(ensure_snapshot("smollm3-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)


@pytest.mark.parametrize(
    ("changes", "listed", "interval"),
    [({"no_rope_layers": [1, 0]}, "2 entries", 4), ({"no_rope_layer_interval": 0}, "None", 0)],
)
def test_layers_that_are_not_told_apart_are_refused(
    raw: Mapping[str, Any], changes: dict[str, Any], listed: str, interval: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "config.json does not say which layers rotate\n"
        f"  no rope layers          {listed}\n"
        f"  no rope layer interval  {interval}\n"
        "  num hidden layers       4\n"
        "  next                    list 1 (rotated) or 0 for every layer in no_rope_layers, or give an interval of 1 or more"
    )


@pytest.mark.parametrize(
    ("key", "value", "known"), [("hidden_act", "gelu", '"silu"'), ("use_sliding_window", True, "false")]
)
def test_what_it_does_not_compute_is_refused(raw: Mapping[str, Any], key: str, value: object, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"smollm3 computes {key} {known} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )  # fmt: skip


def test_sliding_layers_are_refused(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 16})
    assert str(caught.value) == (
        "smollm3 has no such layers\n"
        "  layer types        4 of kind full_attention, sliding_attention\n"
        "  num hidden layers  4\n"
        "  known              full_attention\n"
        "  next               mend config.json"
    )


@pytest.mark.parametrize(("kv", "width"), [(3, 64), (0, 64), (2, 63)])
def test_heads_that_do_not_fit_are_refused(raw: Mapping[str, Any], kv: int, width: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "num_key_value_heads": kv, "head_dim": width})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        "  num attention heads  4\n"
        f"  num key value heads  {kv}\n"
        f"  head dim             {width}\n"
        f"  rotated              {width}\n"
        "  next                 mend config.json"
    )


def test_keys_of_published_configs_are_known(raw: Mapping[str, Any]) -> None:
    published = {
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28,
        "mlp_bias": False,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    assert replace(Config.read({**raw, **published}), layer_types=None) == Config.read(raw)


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_layer_that_rotates_and_should_not_is_found_there(monkeypatch: Plant) -> None:
    monkeypatch.setattr(Config, "rotates", lambda _self, _layer: True)
    assert found(TAPS) == ("DIFFERENT", "model.layers.3.self_attn.o_proj")


@needs_goldens
def test_a_layer_that_should_rotate_and_does_not_is_found_there(monkeypatch: Plant) -> None:
    monkeypatch.setattr(Config, "rotates", lambda _self, layer: layer % 4 != 0)  # counted from 0 rather than from 1
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.o_proj")


@needs_goldens
def test_a_rope_base_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = smollm3.make_rope
    monkeypatch.setattr(smollm3, "make_rope", lambda width, *, base, **more: right(width, base=base * 1.001, **more))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.o_proj")
