"""granitemoehybrid: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.chosen_experts import ChosenExperts
from engine.errors import ConfigError
from engine.families import granitemoehybrid
from engine.families.granitemoehybrid import FIXED, Block, Config, Model
from engine.grouped_attention import GroupedAttention
from engine.model import open_model
from engine.moe import weighted_sum
from engine.norm import RMSNorm
from engine.rope import make_rope
from engine.short_convolution import ShortConvolution
from engine.state_space_mixer import OutputNorm
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits_of, raw_config

TAPS = "granitemoehybrid-tiny/f32/fp/forced/p40-taps-tail-split"
DENSE = "granitemoehybrid_dense-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "granitemoehybrid-hub-tiny/f32/fp/forced/p40-tail-split"
SCAN = "model.layers.0.mamba"
EXPERTS = "model.layers.0.block_sparse_moe"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("granitemoehybrid-tiny")


@pytest.mark.parametrize("name", ["granitemoehybrid", "granitemoehybrid_dense"])
def test_the_hubs_layout_is_the_same_model(same_bits: Callable[..., None], name: str) -> None:
    same_bits(logits_of(f"{name}-tiny"), logits_of(f"{name}-hub-tiny"))


def test_a_scan_remembers_a_state_and_attention_all() -> None:
    model = open_model(ensure_snapshot("granitemoehybrid-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["arrays-2", "arrays-2", "plain", "arrays-2"]
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


def test_a_config_without_scans_needs_none_of_their_keys(raw: dict[str, Any]) -> None:
    plain = {key: value for key, value in raw.items() if not key.startswith("mamba_")}
    assert Config.read({**plain, "layer_types": ["attention"] * 4}).mamba_n_heads is None
    with pytest.raises(ConfigError, match=r"^the heads of the scan do not fit together\n"):
        Config.read(plain)


@pytest.mark.parametrize(
    "kinds", [["mamba", "attention"], ["mamba", "mamba", "attention", "conv"]], ids=["too-few", "unknown"]
)
def test_layers_that_are_not_all_named_are_refused(raw: dict[str, Any], kinds: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "layer_types": kinds})
    assert str(caught.value) == (
        "layer_types does not name every layer\n"
        f"  layer types        {', '.join(kinds)}\n"
        "  num hidden layers  4\n"
        "  known              mamba, attention\n"
        "  next               mend config.json"
    )


def test_other_positions_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "position_embedding_type": "alibi"})
    assert str(caught.value) == (
        "granitemoehybrid has no such positions\n"
        "  position embedding type  alibi\n"
        "  known                    rope, nope\n"
        "  next                     mend config.json"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("normalization_function", "layernorm"), ("rope_scaling", {"type": "yarn"})],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"granitemoehybrid computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


def test_experts_that_do_not_fit_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^the experts of config\.json do not fit together\n"):
        Config.read({**raw, "num_experts_per_tok": 9})


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, DENSE, HUB])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    ("key", "value", "earliest"),
    [
        ("embedding_multiplier", 12.01, "model.layers.0.input_layernorm"),
        ("attention_multiplier", 0.0157, "model.layers.2.self_attn.o_proj"),
        ("residual_multiplier", 0.2201, "model.layers.0.post_attention_layernorm"),
        ("rms_norm_eps", 2e-6, "model.layers.0.input_layernorm"),
        ("logits_scaling", 6.01, None),
    ],
)
def test_another_multiplier_is_found_where_it_enters(
    monkeypatch: Plant, key: str, value: float, earliest: str | None
) -> None:
    right = Config.read
    monkeypatch.setattr(Config, "read", lambda raw: right({**raw, key: value}))
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_logits_times_the_reciprocal_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr(Model, "logits", lambda self, hidden: self.embedding.as_head(hidden) * (1 / 6.0))
    assert found(TAPS) == ("DIFFERENT", None)


@needs_goldens
def test_attention_that_rotates_where_there_are_no_positions_is_found(monkeypatch: Plant) -> None:
    right = GroupedAttention.__call__
    rope = make_rope(64, base=10000.0)
    monkeypatch.setattr(GroupedAttention, "__call__", lambda self, x, cache: right(replace(self, rope=rope), x, cache))
    assert found(TAPS) == ("DIFFERENT", "model.layers.2.self_attn.o_proj")


@needs_goldens
@pytest.mark.parametrize(
    "wrong", [lambda *_args, **_named: None, lambda width, *, base: make_rope(width, base=base + 1)]
)
def test_a_wrong_rotation_is_found_where_there_are_positions(monkeypatch: Plant, wrong: Any) -> None:
    monkeypatch.setattr(granitemoehybrid, "make_rope", wrong)
    assert found(DENSE) == ("DIFFERENT", "model.layers.1.self_attn.o_proj")


def softmax_over_all(self: ChosenExperts, x: mx.array) -> mx.array:
    scores = mx.softmax(self.router(x), axis=-1, precise=True)
    experts = tap(f"{self.path}.router", mx.argpartition(scores, kth=-self.chosen, axis=-1)[..., -self.chosen :])
    return tap(self.path, weighted_sum(self.experts(x, experts), mx.take_along_axis(scores, experts, axis=-1)))


def least_likely(self: ChosenExperts, x: mx.array) -> mx.array:
    logits = self.router(x)
    experts = tap(f"{self.path}.router", mx.argpartition(logits, kth=self.chosen, axis=-1)[..., : self.chosen])
    weights = mx.softmax(mx.take_along_axis(logits, experts, axis=-1), axis=-1, precise=True)
    return tap(self.path, weighted_sum(self.experts(x, experts), weights))


def likeliest_in_order(self: ChosenExperts, x: mx.array) -> mx.array:
    logits = self.router(x)
    experts = tap(f"{self.path}.router", mx.argsort(-logits, axis=-1)[..., : self.chosen])
    weights = mx.softmax(mx.take_along_axis(logits, experts, axis=-1), axis=-1, precise=True)
    return tap(self.path, weighted_sum(self.experts(x, experts), weights))


@needs_goldens
@pytest.mark.parametrize(
    ("wrong", "earliest"),
    [
        (softmax_over_all, EXPERTS),
        (least_likely, f"{EXPERTS}.router"),
        (likeliest_in_order, f"{EXPERTS}.router"),
    ],
)
def test_a_router_that_weighs_or_chooses_otherwise_is_found(monkeypatch: Plant, wrong: Any, earliest: str) -> None:
    monkeypatch.setattr(ChosenExperts, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_a_shared_expert_that_is_left_out_is_found_in_the_block(monkeypatch: Plant) -> None:
    right = Block.__call__

    def silent(self: Block, x: mx.array, cache: Any) -> Any:
        return right(replace(self, mlp=lambda normed: 0 * self.mlp(normed)), x, cache)

    monkeypatch.setattr(Block, "__call__", silent)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0")


@needs_goldens
def test_gate_and_up_in_each_others_place_are_found_on_the_hubs_layout(monkeypatch: Plant) -> None:
    class Swapped:
        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

        @staticmethod
        def split(array: mx.array, parts: int, axis: int) -> list[mx.array]:
            return list(reversed(mx.split(array, parts, axis=axis)))

    monkeypatch.setattr(granitemoehybrid, "mx", Swapped())
    assert found(HUB) == ("DIFFERENT", None)


@needs_goldens
def test_a_convolution_that_forgets_is_found_there(monkeypatch: Plant) -> None:
    right = ShortConvolution.__call__
    monkeypatch.setattr(ShortConvolution, "__call__", lambda self, x, _state, _ends=None: right(self, x, None))
    assert found(TAPS) == ("DIFFERENT", f"{SCAN}.conv1d")


@needs_goldens
def test_a_gate_after_the_norm_is_found_there(monkeypatch: Plant) -> None:
    right = OutputNorm.__call__
    monkeypatch.setattr(OutputNorm, "__call__", lambda self, y, gate: right(replace(self, gate_first=False), y, gate))
    assert found(TAPS) == ("DIFFERENT", f"{SCAN}.norm")


@needs_goldens
def test_bounds_of_the_time_steps_that_are_ignored_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr(granitemoehybrid, "read_limits", lambda _bounds: (0.001, 100.0))
    assert found(DENSE) == ("DIFFERENT", f"{SCAN}.norm")


@needs_goldens
def test_a_norm_that_is_skipped_is_found_there(monkeypatch: Plant) -> None:
    right, path = RMSNorm.__call__, "model.layers.2.post_attention_layernorm"

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        return tap(self.path, x) if self.path == path else right(self, x)

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", path)
