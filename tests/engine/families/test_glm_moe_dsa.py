"""glm_moe_dsa: deepseek_v32's graph in other words; what differs is refused, read and found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.errors import ConfigError
from engine.families import deepseek_v32
from engine.families.deepseek_v32 import Attention
from engine.families.glm_moe_dsa import Config
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, judged, needs_goldens
from tests.engine.families.tiny_snapshot import logits_of, raw_config

TAPS = "glm_moe_dsa-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "glm_moe_dsa-hub-tiny/f32/fp/forced/p40-tail-split"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("glm_moe_dsa-tiny")


def test_both_layouts_are_one_model(same_bits: Callable[..., None]) -> None:
    names = mx.load(str(ensure_snapshot("glm_moe_dsa-hub-tiny").path / "model.safetensors"))
    assert "model.layers.4.eh_proj.weight" in names
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in names
    same_bits(logits_of("glm_moe_dsa-tiny"), logits_of("glm_moe_dsa-hub-tiny"))


def test_every_layer_remembers_latents_and_keys_of_the_indexer() -> None:
    model = open_model(ensure_snapshot("glm_moe_dsa-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["list[plain,plain]"] * 4


def test_its_rotary_parameters_stand_in_one_entry(raw: dict[str, Any]) -> None:
    config = Config.read(raw)
    assert isinstance(config, deepseek_v32.Config)
    assert (config.rope_theta, config.rope_scaling) == (1e6, {"rope_type": "default"})
    assert config.indexer_rope_interleave


def test_yarn_in_that_entry_changes_rotation_and_scale(raw: dict[str, Any]) -> None:
    yarn = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 1.0}
    config = Config.read({**raw, "rope_parameters": yarn})
    assert config.rope(neighbours=True).periods is not None


@pytest.mark.parametrize("base", [None, 0, -1.0, "1e6", True])
def test_an_entry_without_a_base_is_refused(raw: dict[str, Any], base: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "rope_parameters": {"rope_type": "default", "rope_theta": base}})
    assert str(caught.value) == (
        "config.json has no positive rope_theta\n"
        "  rope theta       None\n"
        "  rope scaling     None\n"
        f"  rope parameters  {{'rope_type': 'default', 'rope_theta': {base!r}}}\n"
        "  next             mend config.json"
    )


@pytest.mark.parametrize("key", ["rope_theta", "rope_scaling"])
def test_the_words_of_deepseek_are_unknown(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"config key '{key}' is unknown to model_type 'glm_moe_dsa'"):
        Config.read({**raw, key: None})


@pytest.mark.parametrize("key", ["n_group", "rms_norm_eps", "attention_bias", "n_shared_experts"])
def test_nothing_is_left_to_a_default(raw: dict[str, Any], key: str) -> None:
    del raw[key]
    with pytest.raises(ConfigError, match=rf"lacks what model_type 'glm_moe_dsa' needs\n  missing  {key}\n"):
        Config.read(raw)


def test_attention_that_does_not_turn_neighbouring_pairs_is_refused(raw: dict[str, Any]) -> None:
    assert Config.read({**raw, "rope_interleave": True}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "rope_interleave": False})
    assert str(caught.value) == (
        "glm_moe_dsa computes rope_interleave true only\n"
        "  found  false\n"
        "  next   use a snapshot whose config.json says so"
    )


def test_sizes_and_experts_that_do_not_fit_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the sizes of config\.json do not fit together"):
        Config.read({**raw, "index_topk": 0})
    with pytest.raises(ConfigError, match=r"the experts of config\.json do not fit together"):
        Config.read({**raw, "num_experts_per_tok": 9})


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, HUB])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    ("change", "earliest"),
    [
        pytest.param(lambda c: replace(c, indexer_rope_interleave=False), "indexer", id="pairs-of-the-indexer"),
        pytest.param(lambda c: replace(c, rope_theta=1001000.0), "unembed_out", id="base"),
    ],
)
def test_another_rotation_is_found_where_it_first_counts(
    monkeypatch: Plant, change: Callable[[deepseek_v32.Config], deepseek_v32.Config], earliest: str
) -> None:
    right = Attention.take
    monkeypatch.setattr(Attention, "take", lambda checkpoint, path, config: right(checkpoint, path, change(config)))
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.self_attn.{earliest}")


@needs_goldens
def test_one_position_more_is_found_in_the_first_indexer(monkeypatch: Plant) -> None:
    right = Attention.take
    monkeypatch.setattr(
        Attention, "take", lambda checkpoint, path, config: right(checkpoint, path, replace(config, index_topk=17))
    )
    verdict = judged(TAPS)
    assert verdict.status.value == "INCOMPARABLE"
    assert str(verdict.facts["wrong"]).splitlines()[0] == (
        "activations/0/model.layers.0.self_attn.indexer: expected U32[1, 1, 16], actual U32[1, 1, 17]"
    )
