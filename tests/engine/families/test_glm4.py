"""glm4: what it refuses, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.errors import ConfigError
from engine.families import glm4
from engine.families.glm4 import FIXED, Block, Config
from engine.mlp import FusedGatedMLP
from engine.model import open_model
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.planted_norm import plant_norm
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "glm4-tiny/f32/fp/forced/p40-taps-tail-split"
ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("glm4-tiny")


def test_every_layer_remembers_all() -> None:
    model = open_model(ensure_snapshot("glm4-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("rope_scaling", {"type": "yarn", "factor": 4.0}), ("tie_word_embeddings", True)],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"glm4 computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize(
    ("changes", "kv_heads", "rotated"),
    [
        ({"num_key_value_heads": 3}, 3, 32),
        ({"partial_rotary_factor": 0.25 + 1 / 64}, 2, 17),
        ({"partial_rotary_factor": 2.0}, 2, 128),
        ({"partial_rotary_factor": 0.0}, 2, 0),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    raw: dict[str, Any], changes: dict[str, Any], kv_heads: int, rotated: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        "  num attention heads  4\n"
        f"  num key value heads  {kv_heads}\n"
        "  head dim             64\n"
        f"  rotated              {rotated}\n"
        "  next                 mend config.json"
    )


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    ("width", "change"),
    [
        pytest.param(32, {"base": 10010.0}, id="base"),
        pytest.param(32, {"traditional": False}, id="pairs"),
        pytest.param(64, {}, id="all-of-the-head"),
        pytest.param(30, {}, id="two-less"),
    ],
)
def test_another_rotation_is_found_in_the_first_attention(
    monkeypatch: Plant, width: int, change: dict[str, Any]
) -> None:
    right = glm4.make_rope
    monkeypatch.setattr(glm4, "make_rope", lambda _, **given: right(width, **{**given, **change}))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
@pytest.mark.parametrize(
    "leaf",
    ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"],
)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _norm, x: x, id="skipped"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, norm.eps * 10), id="eps"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, 1 + norm.weight, norm.eps), id="offset"),
    ],
)
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, leaf: str, change: Callable[..., mx.array]) -> None:
    plant_norm(monkeypatch, leaf, change)
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.{leaf}")


@needs_goldens
def test_a_norm_of_the_sum_rather_than_of_the_branch_is_found_there(monkeypatch: Plant) -> None:
    def wrong(self: Block, x_BLD: mx.array, cache: Any) -> Any:
        attended, cache = self.attention(self.attention_norm(x_BLD), cache)
        h_BLD = self.after_attention(x_BLD + attended)
        return tap(self.path, h_BLD + self.after_mlp(self.mlp(self.mlp_norm(h_BLD)))), cache

    monkeypatch.setattr(Block, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.post_self_attn_layernorm")


@needs_goldens
def test_gate_and_up_in_the_other_order_are_found_in_the_projection_after_them(monkeypatch: Plant) -> None:
    def wrong(self: FusedGatedMLP, x_BLD: mx.array) -> mx.array:
        up, gate = mx.split(self.gate_up(x_BLD), 2, axis=-1)
        return tap(self.path, self.down(self.activation(gate, up)))

    monkeypatch.setattr(FusedGatedMLP, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.mlp.down_proj")
