"""glm4_moe: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import router
from engine.errors import CheckpointError, ConfigError
from engine.families import glm4_moe
from engine.families.glm4_moe import FIXED, Config
from engine.model import open_model
from engine.router import Choice, RoutedMLP
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.planted_norm import plant_norm
from tests.engine.families.tiny_snapshot import logits_of, raw_config

TAPS = "glm4_moe-tiny/f32/fp/forced/p40-taps-tail-split"
ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention
EXPERTS = "model.layers.1.mlp"  # the first layer is dense

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("glm4_moe-tiny")


def test_experts_one_by_one_and_a_layer_to_drop_are_the_same_model(same_bits: Callable[..., None]) -> None:
    names = mx.load(str(ensure_snapshot("glm4_moe-hub-tiny").path / "model.safetensors"))
    assert "model.layers.4.shared_head.head.weight" in names
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in names
    same_bits(logits_of("glm4_moe-tiny"), logits_of("glm4_moe-hub-tiny"))


def test_only_the_one_layer_after_the_last_is_dropped(edit_json: Callable[..., None], tmp_path: Path) -> None:
    for file in ensure_snapshot("glm4_moe-hub-tiny").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "config.json", num_hidden_layers=2)  # so that layer 2 is dropped, 3 and 4 are not
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path, dtype="f32")
    assert str(caught.value) == (
        "the checkpoint has 44 tensors that the config does not account for\n"
        "  tensors  model.layers.3.input_layernorm.weight, model.layers.3.mlp.experts.0.down_proj.weight, "
        "model.layers.3.mlp.experts.0.gate_proj.weight and 41 more\n"
        "  next     take the config.json that belongs to these weights"
    )


def test_every_layer_remembers_all() -> None:
    model = open_model(ensure_snapshot("glm4_moe-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("scoring_func", "softmax"),
        ("tie_word_embeddings", True),
        ("topk_method", "greedy"),
    ],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"glm4_moe computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"num_experts_per_tok": 9}, (8, 9, 1, 1)),
        ({"n_group": 3}, (8, 2, 3, 1)),
        ({"n_group": 2, "topk_group": 3}, (8, 2, 2, 3)),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    raw: dict[str, Any], changes: dict[str, Any], numbers: tuple[int, int, int, int]
) -> None:
    experts, chosen, groups, kept = numbers
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "the experts of config.json do not fit together\n"
        f"  n routed experts     {experts}\n"
        f"  num experts per tok  {chosen}\n"
        f"  n group              {groups}\n"
        f"  topk group           {kept}\n"
        "  next                 mend config.json"
    )


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 3}, {"partial_rotary_factor": 2.0}])
def test_heads_that_do_not_fit_are_refused(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the heads of config\.json do not fit together"):
        Config.read({**raw, **changes})


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    ("width", "change"),
    [
        pytest.param(32, {"base": 1001000.0}, id="base"),
        pytest.param(32, {"traditional": True}, id="pairs"),
        pytest.param(64, {}, id="all-of-the-head"),
    ],
)
def test_another_rotation_is_found_in_the_first_attention(
    monkeypatch: Plant, width: int, change: dict[str, Any]
) -> None:
    right = glm4_moe.make_rope
    monkeypatch.setattr(glm4_moe, "make_rope", lambda _, **given: right(width, **{**given, **change}))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
@pytest.mark.parametrize("leaf", ["self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _norm, x: x, id="skipped"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, norm.eps * 10), id="eps"),
    ],
)
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, leaf: str, change: Callable[..., mx.array]) -> None:
    plant_norm(monkeypatch, leaf, change)
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.{leaf}")


def without_factor(scores: mx.array, bias: mx.array, choice: Choice) -> tuple[mx.array, mx.array]:
    return CHOOSE(scores, bias, replace(choice, factor=1.0))


def not_normalised(scores: mx.array, bias: mx.array, choice: Choice) -> tuple[mx.array, mx.array]:
    return CHOOSE(scores, bias, replace(choice, normalised=False))


def weighed_by_corrected_scores(scores: mx.array, bias: mx.array, choice: Choice) -> tuple[mx.array, mx.array]:
    return CHOOSE(scores + bias, mx.zeros_like(bias), choice)


def chosen_without_correction(scores: mx.array, bias: mx.array, choice: Choice) -> tuple[mx.array, mx.array]:
    return CHOOSE(scores, mx.zeros_like(bias), choice)


def in_reverse_order(scores: mx.array, bias: mx.array, choice: Choice) -> tuple[mx.array, mx.array]:
    experts, weights = CHOOSE(scores, bias, choice)
    return experts[..., ::-1], weights[..., ::-1]


def corrected_downwards(scores: mx.array, bias: mx.array, choice: Choice) -> tuple[mx.array, mx.array]:
    return CHOOSE(scores, -bias, choice)


CHOOSE = router.choose


@needs_goldens
@pytest.mark.parametrize(
    ("wrong", "earliest"),
    [
        (without_factor, EXPERTS),
        (not_normalised, EXPERTS),
        (weighed_by_corrected_scores, EXPERTS),
        (in_reverse_order, f"{EXPERTS}.gate"),
        (corrected_downwards, f"{EXPERTS}.gate"),
        # in layer 1 the one position that is recorded chooses the same experts, others do not
        (chosen_without_correction, "model.layers.2.self_attn.o_proj"),
    ],
)
def test_a_router_that_weighs_or_chooses_otherwise_is_found(monkeypatch: Plant, wrong: Any, earliest: str) -> None:
    monkeypatch.setattr(router, "choose", wrong)
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_a_shared_expert_that_is_weighed_like_the_others_is_found(monkeypatch: Plant) -> None:
    right = RoutedMLP.__call__

    def wrong(self: RoutedMLP, x_BLD: mx.array) -> mx.array:
        assert self.shared is not None
        rest = right(replace(self, shared=None), x_BLD)
        return tap(self.path, rest + self.router.choice.factor * self.shared(x_BLD))

    monkeypatch.setattr(RoutedMLP, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", EXPERTS)
