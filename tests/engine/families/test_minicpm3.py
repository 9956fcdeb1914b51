"""minicpm3: what it refuses, what it remembers, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode
from engine.errors import ConfigError, RequestError
from engine.families import minicpm3
from engine.families.minicpm3 import FIXED, Attention, Block, Config, Model
from engine.generate import steps
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.planted_norm import plant_norm
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "minicpm3-tiny/f32/fp/forced/p40-taps-tail-split"
UNTIED = "minicpm3_untied-tiny/f32/fp/forced/p40-taps-tail-split"
AFTER_ATTENTION = "model.layers.0.self_attn.o_proj"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("minicpm3-tiny")


def test_keys_and_values_can_be_packed_in_groups_that_divide_both() -> None:
    model = open_model(ensure_snapshot("minicpm3-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 32, None)
    (step,) = steps(model, [1, 2, 3], num_steps=1, kv=KVMode(bits=8, group_size=32))
    assert [cache.kind for cache in step.caches] == ["quantized-b8-g32"] * 4
    with pytest.raises(RequestError) as caught:
        steps(model, [1], num_steps=1, kv=KVMode(bits=8, group_size=64))
    assert str(caught.value) == (
        "the KV mode does not fit the model's heads\n"
        "  head width  32\n"
        "  group size  64\n"
        "  next        choose a group size that divides 32"
    )


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("rope_traditional", True)])
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"minicpm3 computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize("form", ["linear", None])
def test_another_rope_scaling_is_refused(raw: dict[str, Any], form: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "rope_scaling": {"type": form} if form else {}})
    assert str(caught.value) == (
        f"minicpm3 turns by longrope only\n  rope scaling  {form}\n  next          mend rope_scaling in config.json"
    )


def test_a_config_without_rope_scaling_is_refused(raw: dict[str, Any]) -> None:
    del raw["rope_scaling"]
    with pytest.raises(ConfigError, match=r"lacks what model_type 'minicpm3' needs\n  missing  rope_scaling\n"):
        Config.read(raw)


@pytest.mark.parametrize("key", ["dim_model_base", "num_attention_heads", "num_hidden_layers", "q_lora_rank"])
def test_sizes_that_do_not_fit_are_refused(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: 0})
    assert str(caught.value).startswith("the sizes of config.json do not fit together\n  dim model base ")
    assert f"  {key.replace('_', ' '):<19}  0\n" in str(caught.value)


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, UNTIED])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize("change", [{"base": 10001.0}, {"max_positions": 512}])
def test_another_rotation_is_found_in_the_first_attention(monkeypatch: Plant, change: dict[str, Any]) -> None:
    right = minicpm3.make_rope
    monkeypatch.setattr(minicpm3, "make_rope", lambda width, **given: right(width, **{**given, **change}))
    assert found(TAPS) == ("DIFFERENT", AFTER_ATTENTION)


@needs_goldens
def test_a_scale_of_the_values_width_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = minicpm3.attend

    def wrong(q: mx.array, k: mx.array, v: mx.array, **given: Any) -> mx.array:
        return right(q, k, v, **{**given, "scale": v.shape[-1] ** -0.5})

    monkeypatch.setattr(minicpm3, "attend", wrong)
    assert found(TAPS) == ("DIFFERENT", AFTER_ATTENTION)


@needs_goldens
@pytest.mark.parametrize("leaf", ["q_a_layernorm", "kv_a_layernorm"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _norm, x: x, id="skipped"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, 1e-6), id="the-eps-of-the-config"),
    ],
)
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, leaf: str, change: Callable[..., mx.array]) -> None:
    plant_norm(monkeypatch, leaf, change)
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.self_attn.{leaf}")


@needs_goldens
def test_an_unscaled_embedding_is_found_in_the_first_norm(monkeypatch: Plant) -> None:
    right = Model.hidden

    def wrong(self: Model, *given: Any) -> Any:
        return right(replace(self, config=replace(self.config, scale_emb=12.001)), *given)

    monkeypatch.setattr(Model, "hidden", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.input_layernorm")


@needs_goldens
def test_unscaled_branches_are_found_in_the_first_norm_after_one(monkeypatch: Plant) -> None:
    right = Block.__call__
    monkeypatch.setattr(Block, "__call__", lambda self, *given: right(replace(self, branch_scale=1.0), *given))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.post_attention_layernorm")


@needs_goldens
def test_an_undivided_input_of_the_head_is_found_in_the_head(monkeypatch: Plant) -> None:
    right = Model.logits

    def wrong(self: Model, hidden: mx.array) -> mx.array:
        return right(replace(self, config=replace(self.config, dim_model_base=self.config.hidden_size)), hidden)

    monkeypatch.setattr(Model, "logits", wrong)
    assert found(UNTIED) == ("DIFFERENT", "lm_head")
    assert found(TAPS) == ("IDENTICAL", None), "a tied head divides nothing"


@needs_goldens
def test_keys_turned_at_the_wrong_position_are_found(monkeypatch: Plant) -> None:
    right = Attention.__call__

    def wrong(self: Attention, x: mx.array, cache: Any) -> Any:
        rope = self.rope
        late = type("Late", (), {"__call__": lambda _, part, offset: rope(part, offset + (part.shape[1] == 1))})()
        return right(replace(self, rope=late), x, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(Attention, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", AFTER_ATTENTION)
