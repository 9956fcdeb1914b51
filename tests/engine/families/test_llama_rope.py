"""llama's forms of rotation, biases and heads: faults planted in each are seen where they begin."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine import rope
from engine.families import llama
from engine.linear import Linear
from engine.taps import tap
from tests.engine.families.committed_golden import found, needs_goldens

FORMS = ("llama_default", "llama_linear", "llama", "llama_yarn")
FIRST = "model.layers.0.self_attn.o_proj"  # the first projection after attention

pytestmark = needs_goldens
Plant = pytest.MonkeyPatch


def taps(config: str) -> str:
    return f"{config}-tiny/f32/fp/forced/p40-taps-tail-split"


@pytest.mark.parametrize("config", FORMS)
def test_without_a_fault_the_engine_is_the_oracle(config: str) -> None:
    assert found(taps(config)) == ("IDENTICAL", None)


@pytest.mark.parametrize("config", FORMS)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda given: {**given, "base": given["base"] * 1.001}, id="base"),
        pytest.param(lambda given: {**given, "traditional": True}, id="pairs"),
    ],
)
def test_another_rotation_is_found_in_the_first_attention(
    monkeypatch: Plant, config: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    right = llama.make_rope
    monkeypatch.setattr(llama, "make_rope", lambda width, **given: right(width, **change(given)))
    assert found(taps(config)) == ("DIFFERENT", FIRST)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("llama_linear", {"factor": 4.01}),
        ("llama", {"factor": 8.01}),
        ("llama", {"low_freq_factor": 1.01}),
        ("llama", {"high_freq_factor": 4.01}),
        ("llama", {"original_max_position_embeddings": 65}),
        ("llama_yarn", {"factor": 8.01}),
        ("llama_yarn", {"original_max_position_embeddings": 48}),
        ("llama_yarn", {"beta_fast": 1.5}),
        ("llama_yarn", {"beta_slow": 0.2}),
        ("llama_yarn", {"mscale": 1.001}),
        ("llama_yarn", {"mscale_all_dim": 0.501}),
    ],
)
def test_every_number_of_a_scaling_entry_counts(monkeypatch: Plant, config: str, changes: Mapping[str, Any]) -> None:
    right = llama.make_rope

    def wrong(width: int, *, scaling: Mapping[str, Any], **given: Any) -> rope.Rope:
        assert changes.keys() <= scaling.keys()
        return right(width, scaling={**scaling, **changes}, **given)

    monkeypatch.setattr(llama, "make_rope", wrong)
    assert found(taps(config)) == ("DIFFERENT", FIRST)


def test_a_gain_that_only_queries_get_is_found(monkeypatch: Plant) -> None:
    right = rope.Rope.__call__

    def wrong(self: rope.Rope, x_BHLE: mx.array, offset: int) -> mx.array:
        return right(replace(self, gain=1.0) if x_BHLE.shape[1] == 2 else self, x_BHLE, offset)  # two KV heads

    monkeypatch.setattr(rope.Rope, "__call__", wrong)
    assert found(taps("llama_yarn")) == ("DIFFERENT", FIRST)


@pytest.mark.parametrize("leaf", ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_bias_that_is_left_out_is_found_in_its_projection(monkeypatch: Plant, leaf: str) -> None:
    right = Linear.__call__
    path = f"model.layers.0.{leaf}"

    def wrong(self: Linear, x: mx.array) -> mx.array:
        return right(replace(self, bias=None) if self.path == path else self, x)

    monkeypatch.setattr(Linear, "__call__", wrong)
    assert found(taps("llama_linear")) == ("DIFFERENT", path)


def test_a_bias_that_is_added_after_the_product_is_found(monkeypatch: Plant) -> None:
    right = Linear.__call__

    def wrong(self: Linear, x: mx.array) -> mx.array:
        if self.bias is None or not isinstance(self.weight, mx.array):
            return right(self, x)
        return tap(self.path, x @ self.weight.T + self.bias)

    monkeypatch.setattr(Linear, "__call__", wrong)
    assert found("llama_linear-tiny/bf16/fp/forced/p40-tail-split") == ("DIFFERENT", None)
