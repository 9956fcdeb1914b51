"""mixtral: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.errors import ConfigError
from engine.families import mixtral
from engine.families.mixtral import FIXED, Config, ExpertMLP
from engine.model import open_model
from engine.moe import weighted_sum
from engine.norm import RMSNorm
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits_of, raw_config

TAPS = "mixtral-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "mixtral-hub-tiny/f32/fp/forced/p40-tail-split"
ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention
EXPERTS = "model.layers.0.block_sparse_moe"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("mixtral-tiny")


def test_experts_one_by_one_are_the_stacked_ones(same_bits: Callable[..., None]) -> None:
    same_bits(logits_of("mixtral-tiny"), logits_of("mixtral-hub-tiny"))


def test_every_layer_remembers_all() -> None:
    model = open_model(ensure_snapshot("mixtral-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


def test_heads_of_keys_default_to_those_of_queries(raw: dict[str, Any]) -> None:
    del raw["num_key_value_heads"]
    assert Config.read(raw).kv_heads == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("sliding_window", 4096),
    ],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"mixtral computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize(
    ("changes", "width", "head_dim"), [({"head_dim": 32}, 256, 32), ({"hidden_size": 258}, 258, 64)]
)
def test_heads_that_do_not_share_out_the_width_are_refused(
    raw: dict[str, Any], changes: dict[str, Any], width: int, head_dim: int
) -> None:
    assert Config.read({**raw, "head_dim": 64}).head_width == 64
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  hidden size          {width}\n"
        "  num attention heads  4\n"
        "  num key value heads  2\n"
        f"  head dim             {head_dim}\n"
        f"  rotated              {head_dim}\n"
        "  next                 mend config.json"
    )


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 3}, {"num_experts_per_tok": 9}])
def test_heads_and_experts_that_do_not_fit_are_refused(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"of config\.json do not fit together"):
        Config.read({**raw, **changes})


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)
    assert found(HUB) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda given: {**given, "base": given["base"] * 1.001}, id="base"),
        pytest.param(lambda given: {**given, "traditional": True}, id="pairs"),
    ],
)
def test_another_rotation_is_found_in_the_first_attention(
    monkeypatch: Plant, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    right = mixtral.make_rope
    monkeypatch.setattr(mixtral, "make_rope", lambda width, **given: right(width, **change(given)))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_another_epsilon_is_found_in_the_first_norm(monkeypatch: Plant) -> None:
    right = RMSNorm.take
    monkeypatch.setattr(RMSNorm, "take", lambda *args, width, eps: right(*args, width=width, eps=2 * eps))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.input_layernorm")


def shares_of_all(self: ExpertMLP, x_BLD: mx.array) -> mx.array:
    scores = self.router(x_BLD)
    experts = mx.argpartition(-scores, kth=self.chosen - 1, axis=-1)[..., : self.chosen]
    shares = mx.take_along_axis(mx.softmax(scores, axis=-1, precise=True), experts, axis=-1)
    return tap(self.path, weighted_sum(self.experts(x_BLD, experts), shares))


def other_order(self: ExpertMLP, x_BLD: mx.array) -> mx.array:
    scores = self.router(x_BLD)
    experts = mx.argpartition(-scores, kth=self.chosen - 1, axis=-1)[..., : self.chosen][..., ::-1]
    weights = mx.softmax(mx.take_along_axis(scores, experts, axis=-1), axis=-1, precise=True)
    return tap(self.path, weighted_sum(self.experts(x_BLD, experts), weights))


@needs_goldens
@pytest.mark.parametrize(
    ("wrong", "earliest"),
    [
        pytest.param(shares_of_all, EXPERTS, id="shares-of-all"),
        pytest.param(other_order, f"{EXPERTS}.switch_mlp", id="order"),
    ],
)
def test_a_router_that_weighs_or_orders_otherwise_is_found(monkeypatch: Plant, wrong: Any, earliest: str) -> None:
    monkeypatch.setattr(ExpertMLP, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_names_of_the_hub_that_are_mixed_up_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr(mixtral, "NUMBERED_NAMES", {"gate_proj": "w3", "down_proj": "w2", "up_proj": "w1"})
    assert found(HUB)[0] == "DIFFERENT"
