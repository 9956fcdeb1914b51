"""nemotron_h: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine import grouped_attention, router, ungated_moe
from engine.activation import silu
from engine.errors import ConfigError
from engine.families.nemotron_h import FIXED, Config
from engine.grouped_attention import GroupedAttention
from engine.model import open_model
from engine.rope import make_rope
from engine.router import Choice
from engine.short_convolution import ShortConvolution
from engine.state_space_mixer import OutputNorm
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.planted_norm import plant_norm
from tests.engine.families.tiny_snapshot import logits_of, raw_config

TAPS = "nemotron_h-tiny/f32/fp/forced/p40-taps-tail-split"  # M-M*EM*E
LATENT = "nemotron_h_latent-tiny/f32/fp/forced/p40-taps-tail-split"  # ME*
SCAN = "backbone.layers.0.mixer"
ATTENTION = "backbone.layers.3.mixer"
EXPERTS = "backbone.layers.4.mixer"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("nemotron_h-tiny")


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_latent"])
def test_the_hubs_layout_is_the_same_model(same_bits: Callable[..., None], name: str) -> None:
    same_bits(logits_of(f"{name}-tiny"), logits_of(f"{name}-hub-tiny"))


def test_only_layers_with_a_memory_have_caches() -> None:
    model = open_model(ensure_snapshot("nemotron_h-tiny").path, dtype="f32")
    caches = model.make_caches()
    assert [cache.kind for cache in caches] == ["arrays-2", "arrays-2", "plain", "arrays-2", "plain"]
    _, longer = model.hidden(mx.array([[1, 2, 3]]), caches)
    assert [cache.offset for cache in longer] == [3] * 5
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, "M-M*EM*E"),
        ({"hybrid_override_pattern": ["M", "*"], "num_hidden_layers": 2}, "M*"),
        ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "mlp", "attention", "moe"]}, "M-*E"),
        ({"hybrid_override_pattern": None, "layer_types": ["linear_attention", "full_attention", "conv"]}, "M*M"),
    ],
)
def test_layers_are_spelt_or_listed(raw: dict[str, Any], changes: dict[str, Any], kinds: str) -> None:
    config = Config.read({**raw, "num_hidden_layers": None, **changes})
    assert config.kinds == kinds


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"hybrid_override_pattern": "M-M*EM*X"}, ("M-M*EM*X", "absent", 8)),
        ({"hybrid_override_pattern": "M*"}, ("M*", "absent", 8)),
        ({"hybrid_override_pattern": None}, (None, "absent", 8)),
        (
            {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "rwkv"], "num_hidden_layers": 2},
            (None, "mamba, rwkv", 2),
        ),
    ],
)
def test_layers_that_are_not_clear_are_refused(
    raw: dict[str, Any], changes: dict[str, Any], shown: tuple[object, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    pattern, listed, count = shown
    assert str(caught.value) == (
        "config.json does not say what every layer is\n"
        f"  hybrid override pattern  {pattern}\n"
        f"  layers block type        {listed}\n"
        f"  num hidden layers        {count}\n"
        "  known                    a pattern of M, *, -, E, or a list of attention, conv, full_attention, "
        "linear_attention, mamba, mlp, moe\n"
        "  next                     mend config.json"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("sliding_window", 16),
    ],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"nemotron_h computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


def test_experts_that_do_not_fit_are_refused_where_there_are_any(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "num_experts_per_tok": 5})
    assert str(caught.value) == (
        "the experts of config.json do not fit together\n"
        "  n routed experts     8\n"
        "  num experts per tok  5\n"
        "  n group              2\n"
        "  topk group           1\n"
        "  next                 mend config.json"
    )
    Config.read({**raw, "num_experts_per_tok": 5, "hybrid_override_pattern": "M*", "num_hidden_layers": 2})


def test_time_steps_are_bounded_only_where_the_config_says_so(raw: dict[str, Any]) -> None:
    assert Config.read(raw).limits == (0.0, math.inf)
    assert Config.read({**raw, "time_step_limit": [0.1, 0.2]}).limits == (0.1, 0.2)


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, LATENT])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    ("change", "earliest"),
    [
        pytest.param({"factor": 2.4}, EXPERTS, id="factor"),
        pytest.param({"normalised": False}, EXPERTS, id="not-normalised"),
        pytest.param({"groups": 1}, f"{EXPERTS}.gate", id="groups"),
        pytest.param({"chosen": 1}, EXPERTS, id="one"),
    ],
)
def test_a_router_that_weighs_or_chooses_otherwise_is_found(
    monkeypatch: Plant, change: dict[str, Any], earliest: str
) -> None:
    right = router.choose

    def wrong(scores: mx.array, bias: mx.array, choice: Choice) -> tuple[mx.array, mx.array]:
        experts, weights = right(scores, bias, replace(choice, **change))
        if experts.shape[-1] < choice.chosen:  # the same shape as before: the second one counts nothing
            experts, _ = right(scores, bias, choice)
            weights = mx.concatenate([weights, mx.zeros_like(weights)], axis=-1)
        return experts, weights

    monkeypatch.setattr(router, "choose", wrong)
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_experts_in_another_order_are_found_in_the_router(monkeypatch: Plant) -> None:
    right = router.choose
    monkeypatch.setattr(router, "choose", lambda *given: tuple(part[..., ::-1] for part in right(*given)))
    assert found(TAPS) == ("DIFFERENT", f"{EXPERTS}.gate")


@needs_goldens
def test_a_correction_that_counts_is_found_in_the_experts(monkeypatch: Plant) -> None:
    right = router.choose
    monkeypatch.setattr(router, "choose", lambda scores, bias, choice: right(scores + bias, 0 * bias, choice))
    assert found(TAPS) == ("DIFFERENT", EXPERTS)


@needs_goldens
@pytest.mark.parametrize("wrong", [silu, lambda x: mx.maximum(x, 0)], ids=["silu", "relu"])
def test_another_activation_is_found_in_the_projection_after_it(monkeypatch: Plant, wrong: Any) -> None:
    monkeypatch.setattr(ungated_moe, "relu2", wrong)
    assert found(TAPS) == ("DIFFERENT", "backbone.layers.1.mixer.down_proj")


@needs_goldens
def test_attention_that_rotates_is_found_there(monkeypatch: Plant) -> None:
    right = GroupedAttention.__call__
    rope = make_rope(64, base=10000.0)
    monkeypatch.setattr(GroupedAttention, "__call__", lambda self, x, cache: right(replace(self, rope=rope), x, cache))
    assert found(TAPS) == ("DIFFERENT", f"{ATTENTION}.o_proj")


@needs_goldens
def test_another_scale_of_the_scores_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = grouped_attention.attend
    monkeypatch.setattr(
        grouped_attention, "attend", lambda *args, scale, mask: right(*args, scale=scale * (1 + 2**-20), mask=mask)
    )
    assert found(TAPS) == ("DIFFERENT", f"{ATTENTION}.o_proj")


@needs_goldens
def test_a_convolution_that_forgets_is_found_there(monkeypatch: Plant) -> None:
    right = ShortConvolution.__call__
    monkeypatch.setattr(ShortConvolution, "__call__", lambda self, x, _state, _ends=None: right(self, x, None))
    assert found(TAPS) == ("DIFFERENT", f"{SCAN}.conv1d")


@needs_goldens
@pytest.mark.parametrize("change", [{"eps": 2e-5}, {"group": 256}, {"group": None}], ids=["eps", "one-group", "fused"])
def test_a_wrong_gated_norm_is_found_there(monkeypatch: Plant, change: dict[str, Any]) -> None:
    right = OutputNorm.__call__
    monkeypatch.setattr(OutputNorm, "__call__", lambda self, y, gate: right(replace(self, **change), y, gate))
    assert found(TAPS) == ("DIFFERENT", f"{SCAN}.norm")


@needs_goldens
@pytest.mark.parametrize("path", ["backbone.layers.0.norm", "backbone.layers.3.norm", "backbone.norm_f"])
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, path: str) -> None:
    plant_norm(monkeypatch, path, lambda _, x: x)
    assert found(TAPS) == ("DIFFERENT", path)


@needs_goldens
def test_bounds_of_the_time_steps_that_are_ignored_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr("engine.families.nemotron_h.read_limits", lambda _bounds: (0.0, math.inf))
    assert found(LATENT) == ("DIFFERENT", f"{SCAN}.norm")
