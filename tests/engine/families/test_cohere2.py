"""cohere2: what it refuses, what its layers remember, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode
from engine.cache.rotating import RotatingCache
from engine.errors import ConfigError
from engine.families import cohere2
from engine.families.cohere2 import FIXED, Config
from engine.generate import steps
from engine.model import CausalModel, open_model
from engine.norm import LayerNorm
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "cohere2-tiny/f32/fp/forced/p40-taps-tail-split"
FIRST = "model.layers.0.self_attn.o_proj"  # the first projection after attention
FULL = "model.layers.3.self_attn.o_proj"  # the same in the one layer that sees all positions

Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("cohere2-tiny")


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return open_model(ensure_snapshot("cohere2-tiny").path, dtype="f32")


def test_every_fourth_layer_remembers_all_and_the_others_a_window(model: CausalModel) -> None:
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0"] * 3 + ["plain"]


def test_keys_and_values_of_a_ring_are_packed_too(model: CausalModel) -> None:
    (step,) = steps(model, [1, 2], num_steps=1, kv=KVMode(bits=8, group_size=64))
    assert [cache.kind for cache in step.caches] == ["rotating-quantized-w16-k0-b8-g64"] * 3 + ["quantized-b8-g64"]


@pytest.mark.parametrize("key", FIXED)
def test_a_value_that_is_not_computed_is_refused(raw: Mapping[str, Any], key: str) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: "another"})
    assert str(caught.value) == (
        f"cohere2 computes {key} {json.dumps(FIXED[key])} only\n"
        '  found  "another"\n'
        "  next   use a snapshot whose config.json says so"
    )


def test_other_names_of_the_pattern_must_agree_with_it(raw: Mapping[str, Any]) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    agreeing = Config.read({**raw, "layer_switch": 4, "layer_types": kinds})
    assert [agreeing.window(layer) for layer in range(4)] == [16, 16, 16, None]
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "layer_types": kinds[::-1]})
    assert str(caught.value) == (
        "layer_types contradicts sliding_window_pattern\n"
        f"  layer types  {', '.join(kinds[::-1])}\n"
        f"  expected     {', '.join(kinds)}\n"
        "  next         mend config.json"
    )


@pytest.mark.parametrize(
    ("changes", "window", "pattern", "switch"),
    [
        ({"layer_switch": 3}, 16, 4, "3"),
        ({"sliding_window": 0}, 0, 4, "absent"),
        ({"sliding_window_pattern": 0}, 16, 0, "absent"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(
    *, raw: Mapping[str, Any], changes: dict[str, Any], window: int, pattern: int, switch: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "the pattern of layers does not fit together\n"
        f"  sliding window          {window}\n"
        f"  sliding window pattern  {pattern}\n"
        f"  layer switch            {switch}\n"
        "  next                    mend config.json"
    )


@pytest.mark.parametrize(
    ("changes", "width", "heads", "kv", "head_dim"),
    [
        ({"hidden_size": 128}, 128, 4, 2, 64),
        ({"num_key_value_heads": 3}, 256, 4, 3, 64),
        ({"num_attention_heads": 0}, 256, 0, 2, 64),
        ({"hidden_size": 12, "head_dim": 3}, 12, 4, 2, 3),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    *, raw: Mapping[str, Any], changes: dict[str, Any], width: int, heads: int, kv: int, head_dim: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  hidden size          {width}\n"
        f"  num attention heads  {heads}\n"
        f"  num key value heads  {kv}\n"
        f"  head dim             {head_dim}\n"
        f"  rotated              {head_dim}\n"
        "  next                 mend config.json"
    )


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_window_that_is_off_by_one_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = RotatingCache.mask

    def wrong(self: RotatingCache, L: int, *, window: int | None = None, as_array: bool = False) -> Any:
        return right(self, L, window=window and window - 1, as_array=as_array)

    monkeypatch.setattr(RotatingCache, "mask", wrong)
    assert found(TAPS) == ("DIFFERENT", FIRST)


@needs_goldens
@pytest.mark.parametrize("change", [{"base": 50050.0}, {"traditional": False}], ids=["base", "pairs"])
def test_another_rotation_is_found_in_the_first_attention(monkeypatch: Plant, change: dict[str, Any]) -> None:
    right = cohere2.make_rope
    monkeypatch.setattr(cohere2, "make_rope", lambda width, **given: right(width, **{**given, **change}))
    assert found(TAPS) == ("DIFFERENT", FIRST)


@needs_goldens
def test_a_rotation_of_the_layer_that_has_none_is_found_there(monkeypatch: Plant) -> None:
    right = cohere2.Attention.take

    def wrong(*args: Any) -> Any:
        layer = right(*args)
        return replace(layer, rope=layer.rope or cohere2.make_rope(64, base=50000.0, traditional=True))

    monkeypatch.setattr(cohere2.Attention, "take", wrong)
    assert found(TAPS) == ("DIFFERENT", FULL)


def changed_norm(change: Callable[[LayerNorm, mx.array], mx.array], path: str) -> Callable[..., mx.array]:
    right = LayerNorm.__call__
    return lambda self, x: tap(path, change(self, x)) if self.path == path else right(self, x)


@needs_goldens
@pytest.mark.parametrize("path", ["model.layers.1.input_layernorm", "model.norm"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda norm, x: mx.fast.layer_norm(x, norm.weight, None, norm.eps * 2), id="eps"),
        pytest.param(lambda norm, x: mx.fast.layer_norm(x, 1 + norm.weight, None, norm.eps), id="offset"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, norm.eps), id="no-mean"),
    ],
)
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, change: Any, path: str) -> None:
    monkeypatch.setattr(LayerNorm, "__call__", changed_norm(change, path))
    assert found(TAPS) == ("DIFFERENT", path)


@needs_goldens
def test_a_block_that_is_not_parallel_is_found_in_its_mlp(monkeypatch: Plant) -> None:
    def wrong(self: cohere2.Block, x_BLD: mx.array, cache: Any) -> Any:
        attended, cache = self.attention(self.norm(x_BLD), cache)
        normed_BLD = mx.fast.layer_norm(attended + x_BLD, self.norm.weight, None, self.norm.eps)
        return tap(self.path, attended + self.mlp(normed_BLD) + x_BLD), cache

    monkeypatch.setattr(cohere2.Block, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.mlp.gate_proj")


@needs_goldens
def test_another_order_of_the_sum_is_found_in_the_block(monkeypatch: Plant) -> None:
    def wrong(self: cohere2.Block, x_BLD: mx.array, cache: Any) -> Any:
        normed_BLD = self.norm(x_BLD)
        attended, cache = self.attention(normed_BLD, cache)
        return tap(self.path, attended + (self.mlp(normed_BLD) + x_BLD)), cache

    monkeypatch.setattr(cohere2.Block, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0")


@needs_goldens
def test_a_logit_scale_that_is_off_is_found_after_the_last_module(monkeypatch: Plant) -> None:
    right = Config.read
    monkeypatch.setattr(Config, "read", lambda raw: right({**raw, "logit_scale": 0.3001}))
    assert found(TAPS) == ("DIFFERENT", None)


@needs_goldens
def test_a_logit_scale_before_the_head_is_found(monkeypatch: Plant) -> None:
    def wrong(self: cohere2.Model, hidden_BLD: mx.array) -> mx.array:
        return self.embedding.as_head(hidden_BLD * self.config.logit_scale)

    monkeypatch.setattr(cohere2.Model, "logits", wrong)
    assert found(TAPS) == ("DIFFERENT", None)


@needs_goldens
def test_float16_queries_that_attend_in_float16_are_found(monkeypatch: Plant) -> None:
    right = cohere2.attend

    def wrong(q_BHLE: mx.array, keys: Any, values: Any, **given: Any) -> mx.array:
        return right(q_BHLE.astype(keys.dtype), keys, values, **given)

    monkeypatch.setattr(cohere2, "attend", wrong)
    assert found("cohere2-tiny/f16/fp/forced/p40-tail-split") == ("DIFFERENT", None)
