"""starcoder2: what it refuses, and that planted faults are seen where they begin."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.activation import gelu_approx
from engine.errors import ConfigError
from engine.families import starcoder2
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "starcoder2-tiny/f32/fp/forced/p40-taps-tail-split"
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("starcoder2-tiny")


def test_every_layer_keeps_every_position() -> None:
    model = open_model(ensure_snapshot("starcoder2-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 3
    assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)


@pytest.mark.parametrize(
    ("key", "only", "found_value"),
    [("use_bias", "true", False), ("norm_type", '"layer_norm"', "rms_norm"), ("mlp_type", '"default"', "gated")],
)
def test_what_it_does_not_compute_is_refused(raw: Mapping[str, Any], key: str, only: str, found_value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        starcoder2.Config.read({**raw, key: found_value})
    assert str(caught.value).splitlines()[0] == f"starcoder2 computes {key} {only} only"


def test_heads_that_do_not_fit_are_refused(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the heads of config\.json do not fit together"):
        starcoder2.Config.read({**raw, "num_key_value_heads": 3})


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_rope_base_that_is_off_is_seen_in_the_first_attention(monkeypatch: Plant) -> None:
    make_rope = starcoder2.make_rope

    def bent(width: int, *, base: float, **options: Any) -> object:
        return make_rope(width, base=base * 1.001, **options)

    monkeypatch.setattr(starcoder2, "make_rope", bent)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.o_proj")


@needs_goldens
def test_the_approximate_gelu_is_seen_in_the_first_mlp(monkeypatch: Plant) -> None:
    monkeypatch.setattr(starcoder2, "gelu", gelu_approx)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.mlp.c_proj")


@needs_goldens
def test_an_eps_that_is_off_is_seen_in_the_first_norm(monkeypatch: Plant) -> None:
    read = starcoder2.Config.read
    monkeypatch.setattr(starcoder2.Config, "read", lambda given: replace(read(given), norm_epsilon=1e-3))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.input_layernorm")


@needs_goldens
def test_a_norm_without_its_bias_is_seen_in_the_first_norm(monkeypatch: Plant) -> None:
    take = starcoder2.LayerNorm.take
    monkeypatch.setattr(
        starcoder2.LayerNorm, "take", lambda *args, **options: replace(take(*args, **options), bias=None)
    )
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.input_layernorm")


@needs_goldens
def test_a_bias_that_is_left_out_is_seen_at_its_layer(monkeypatch: Plant) -> None:
    take = starcoder2.MLP.take

    def without(*args: Any) -> starcoder2.MLP:
        mlp = take(*args)
        return replace(mlp, up=replace(mlp.up, bias=None))

    monkeypatch.setattr(starcoder2.MLP, "take", without)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.mlp.c_fc")
