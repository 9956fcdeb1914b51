"""qwen3: how its rotation is configured, what it refuses, and that planted faults are seen where they begin."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.errors import ConfigError
from engine.families import qwen3
from engine.families.qwen3 import Config
from engine.model import open_model
from engine.norm import RMSNorm
from engine.rope import Rope
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.planted_norm import plant_norm
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "qwen3-tiny/f32/fp/forced/p40-taps-tail-split"
ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("qwen3-tiny")


def test_every_layer_keeps_every_position() -> None:
    model = open_model(ensure_snapshot("qwen3-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)


def nested(raw: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config without `rope_theta`, and changes to it."""
    return {key: value for key, value in raw.items() if key != "rope_theta"} | changes


def test_rope_parameters_may_hold_base_and_scaling(raw: Mapping[str, Any]) -> None:
    default = Config.read(nested(raw, rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"})).rope()
    assert (default.base, default.periods, default.gain) == (1000000.0, None, 1.0)
    flat = Config.read({**raw, "rope_scaling": YARN}).rope()
    inner = Config.read(nested(raw, rope_parameters={"rope_theta": 1000000.0, **YARN})).rope()
    assert flat.gain == inner.gain != 1.0
    assert flat.periods is not None
    assert inner.periods is not None
    assert flat.periods.tolist() == inner.periods.tolist()


def test_rope_parameters_that_repeat_what_stands_outside_are_fine(raw: Mapping[str, Any]) -> None:
    twice = {**raw, "rope_scaling": YARN, "rope_parameters": {"rope_theta": 1000000.0, **YARN}}
    assert Config.read(twice).rope().gain == Config.read({**raw, "rope_scaling": YARN}).rope().gain


@pytest.mark.parametrize(
    ("name", "scaling", "parameters"),
    [
        ("rope_theta", None, {"rope_theta": 10000.0}),
        ("rope_scaling", YARN, {"rope_theta": 1000000.0, "rope_type": "default"}),
    ],
)
def test_two_rotations_are_refused(
    raw: Mapping[str, Any], name: str, scaling: dict[str, Any] | None, parameters: dict[str, Any]
) -> None:
    config = Config.read({**raw, "rope_scaling": scaling, "rope_parameters": parameters})
    with pytest.raises(ConfigError) as caught:
        config.rope()
    assert str(caught.value) == (
        f"rope_parameters and {name} contradict each other\n"
        "  rope theta       1000000.0\n"
        f"  rope scaling     {scaling}\n"
        f"  rope parameters  {parameters}\n"
        "  next             mend config.json"
    )


@pytest.mark.parametrize("parameters", [None, {"rope_type": "default"}])
def test_no_base_is_refused(raw: Mapping[str, Any], parameters: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read(nested(raw, rope_parameters=parameters)).rope()
    assert str(caught.value) == (
        "config.json has no positive rope_theta\n"
        "  rope theta       None\n"
        "  rope scaling     None\n"
        f"  rope parameters  {parameters}\n"
        "  next             mend config.json"
    )


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [("hidden_act", "gelu", '"silu"'), ("attention_bias", True, "false"), ("use_sliding_window", True, "false")],
)
def test_what_it_does_not_compute_is_refused(raw: Mapping[str, Any], key: str, value: object, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"qwen3 computes {key} {known} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )  # fmt: skip


def test_sliding_layers_are_refused_and_full_ones_are_not(raw: Mapping[str, Any]) -> None:
    assert Config.read({**raw, "layer_types": ["full_attention"] * 4}).layer_types == ("full_attention",) * 4
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "layer_types": ["full_attention"] * 3 + ["sliding_attention"], "sliding_window": 16})
    assert str(caught.value) == (
        "qwen3 has no such layers\n"
        "  layer types        4 of kind full_attention, sliding_attention\n"
        "  num hidden layers  4\n"
        "  known              full_attention\n"
        "  next               mend config.json"
    )


@pytest.mark.parametrize(("kv", "width"), [(3, 64), (0, 64), (2, 63), (2, 0)])
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


def test_the_width_of_a_head_must_be_given(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)lacks what model_type 'qwen3' needs\n  missing  head_dim\n"):
        Config.read({key: value for key, value in raw.items() if key != "head_dim"})


def test_keys_of_published_configs_are_known(raw: Mapping[str, Any]) -> None:
    published = {"hidden_act": "silu", "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}
    assert Config.read({**raw, **published, "attention_bias": False}) == Config.read(raw)


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_norm_that_is_skipped_is_found_there(monkeypatch: Plant, name: str) -> None:
    plant_norm(monkeypatch, name, lambda _, x: x)
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.self_attn.{name}")


@needs_goldens
def test_an_epsilon_of_the_head_norms_that_is_off_is_found_there(monkeypatch: Plant) -> None:
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        return right(replace(self, eps=1e-5) if self.path.endswith("q_norm") else self, x)

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.q_norm")


@needs_goldens
def test_a_rope_base_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = qwen3.make_rope
    monkeypatch.setattr(qwen3, "make_rope", lambda width, *, base, **more: right(width, base=base * 1.001, **more))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_positions_off_by_one_between_queries_and_keys_are_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = Rope.__call__

    def wrong(self: Rope, x_BHLE: mx.array, offset: int) -> mx.array:
        return right(self, x_BHLE, offset + (x_BHLE.shape[1] == 4))  # four query heads, two of keys

    monkeypatch.setattr(Rope, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", ATTENTION)
