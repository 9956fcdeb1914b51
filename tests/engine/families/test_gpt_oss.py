"""gpt_oss: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import expert_blocks
from engine.activation import clipped_swiglu
from engine.cache.convert import KVMode
from engine.cache.protocol import Tiling
from engine.cache.rotating import RotatingCache
from engine.errors import CheckpointError, ConfigError, RequestError
from engine.families import gpt_oss
from engine.families.gpt_oss import FIXED, Config
from engine.generate import steps
from engine.linear import Linear
from engine.model import open_model
from engine.moe import GatedExperts
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits, logits_of, raw_config

TAPS = "gpt_oss-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "gpt_oss-hub-tiny/f32/fp/forced/p40-tail-split"
ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention
EXPERTS = "model.layers.0.mlp.experts"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("gpt_oss-tiny")


@pytest.fixture
def hub_copy(tmp_path: Path) -> Path:
    """A copy of the hub's layout that a test may damage."""
    for file in ensure_snapshot("gpt_oss-hub-tiny").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_blocks_of_the_hub_are_the_stacked_packed_experts(same_bits: Callable[..., None], tmp_path: Path) -> None:
    drawn, packed = (
        mx.load(str(ensure_snapshot(name).path / "model.safetensors"))
        for name in ("gpt_oss-tiny", "gpt_oss-mxfp4-tiny")
    )
    stacked = {name: array for name, array in drawn.items() if ".experts." not in name}
    stacked |= {name: array for name, array in packed.items() if ".experts." in name}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stacked)
    config = {**raw_config("gpt_oss-tiny"), "quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    same_bits(logits(tmp_path), logits_of("gpt_oss-hub-tiny"))


def test_layers_remember_a_window_and_all_in_turns(raw: dict[str, Any]) -> None:
    model = open_model(ensure_snapshot("gpt_oss-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0", "plain"] * 2
    assert (model.vocabulary, model.head_width) == (512, 64)
    del raw["layer_types"]
    assert [Config.read(raw).window(layer) for layer in range(4)] == [16, None, 16, None]


def test_attention_with_sinks_reads_packed_keys_but_not_in_tiles() -> None:
    model = open_model(ensure_snapshot("gpt_oss-tiny").path, dtype="f32")
    (step,) = steps(model, [1, 2], num_steps=1, kv=KVMode(bits=8, group_size=64))
    assert [cache.kind for cache in step.caches] == ["rotating-quantized-w16-k0-b8-g64", "quantized-b8-g64"] * 2
    with pytest.raises(RequestError) as caught:
        steps(model, [1], num_steps=1, kv=KVMode(bits=8, tiling=Tiling(lifted=True)))
    assert str(caught.value) == (
        "attention with sinks is not tiled\n"
        "  reason  the oracle gives it up for attention over all positions at once, without a word\n"
        "  next    use the same KV mode without tiles"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", False), ("hidden_act", "gelu"), ("swiglu_limit", 8.0), ("tie_word_embeddings", True)],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"gpt_oss computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


def test_the_other_name_of_the_number_of_experts_may_not_say_otherwise(raw: dict[str, Any]) -> None:
    assert Config.read({**raw, "experts_per_token": 2}) == Config.read(raw)
    with pytest.raises(ConfigError, match="gpt_oss computes experts_per_token 2 only"):
        Config.read({**raw, "experts_per_token": 4})


@pytest.mark.parametrize(
    ("changes", "kinds", "layers", "window"),
    [
        ({"layer_types": ["full_attention"] * 3}, "3 of kind full_attention", 4, 16),
        ({"layer_types": ["chunked_attention"] * 4}, "4 of kind chunked_attention", 4, 16),
        ({"num_hidden_layers": 3, "layer_types": None}, "2 of kind full_attention, sliding_attention", 3, 16),
        ({"sliding_window": 0}, "4 of kind full_attention, sliding_attention", 4, 0),
    ],
)
def test_other_layers_are_refused(
    *, raw: dict[str, Any], changes: dict[str, Any], kinds: str, layers: int, window: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "gpt_oss has no such layers\n"
        f"  layer types        {kinds}\n"
        f"  num hidden layers  {layers}\n"
        f"  sliding window     {window}\n"
        "  known              full_attention, or sliding_attention with a sliding_window of at least 1\n"
        "  next               mend config.json"
    )


def test_blocks_that_the_config_knows_nothing_of_are_refused(hub_copy: Path, edit_json: Callable[..., None]) -> None:
    edit_json(hub_copy / "config.json", quantization_config=...)
    with pytest.raises(CheckpointError) as caught:
        open_model(hub_copy, dtype="f32")
    assert str(caught.value) == (
        "model.layers.0.mlp.experts stands in mxfp4 blocks but config.json does not say so\n"
        "  found  model.layers.0.mlp.experts.gate_up_proj_blocks\n"
        "  next   take the config.json that belongs to these weights"
    )


def test_blocks_without_their_scales_are_refused(hub_copy: Path, edit_weights: Callable[..., None]) -> None:
    edit_weights(hub_copy, {"model.layers.2.mlp.experts.down_proj_scales": None})
    with pytest.raises(
        CheckpointError, match=r"the checkpoint has no tensor model\.layers\.2\.mlp\.experts\.down_proj"
    ):
        open_model(hub_copy, dtype="f32")


@pytest.mark.parametrize(
    ("gate", "up", "clipped"),
    [
        (7.0, 0.5, (7.0, 0.5)),
        (9.0, 0.5, (7.0, 0.5)),
        (-9.0, 0.5, (-9.0, 0.5)),
        (1.0, 9.0, (1.0, 7.0)),
        (1.0, -9.0, (1.0, -7.0)),
    ],
)
def test_the_gate_is_clipped_from_above_and_up_on_both_sides(
    gate: float, up: float, clipped: tuple[float, float]
) -> None:
    value = clipped_swiglu(mx.array(gate), mx.array(up)).item()
    inside, linear = clipped
    assert value == pytest.approx((linear + 1) * inside / (1 + math.exp(-1.702 * inside)), rel=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_the_activation_rounds_every_operation(
    *, normal: Callable[..., mx.array], same_bits: Callable[..., None], dtype: mx.Dtype
) -> None:
    def r(values: Any) -> Any:
        """Rounded to the dtype, kept in float32."""
        return np.array(mx.array(np.float32(values)).astype(dtype).astype(mx.float32))

    gate, up = ((4 * normal(seed, (300,))).astype(dtype) for seed in (0, 1))
    G = np.minimum(r(np.array(gate.astype(mx.float32))), np.float32(7))
    U = np.clip(r(np.array(up.astype(mx.float32))), np.float32(-7), np.float32(7))
    squashed = np.array(mx.sigmoid(mx.array(r(r(1.702) * G)).astype(dtype)).astype(mx.float32))
    expected = r(r(U + np.float32(1)) * r(G * squashed))
    same_bits(mx.array(expected).astype(dtype), clipped_swiglu(gate, up))


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)
    assert found(HUB) == ("IDENTICAL", None)


@needs_goldens
def test_a_window_that_is_off_by_one_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = RotatingCache.mask

    def wrong(self: RotatingCache, L: int, *, window: int | None = None, as_array: bool = False) -> Any:
        return right(self, L, window=window and window - 1, as_array=as_array)

    monkeypatch.setattr(RotatingCache, "mask", wrong)
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"base": 150150.0}, id="base"),
        pytest.param({"scaling": None}, id="no-yarn"),
        pytest.param({"factor": 31.0}, id="factor"),
        pytest.param({"original_max_position_embeddings": 2048}, id="context"),
        pytest.param({"beta_fast": 16.0}, id="fast"),
        pytest.param({"beta_slow": 2.0}, id="slow"),
        pytest.param({"mscale_all_dim": 1}, id="no-gain"),
    ],
)
def test_another_rotation_is_found_in_the_first_attention(monkeypatch: Plant, change: dict[str, Any]) -> None:
    right = gpt_oss.make_rope

    def wrong(width: int, *, base: float, scaling: dict[str, Any]) -> Any:
        if "base" in change or "scaling" in change:
            return right(width, **{"base": base, "scaling": scaling, **change})
        return right(width, base=base, scaling={**scaling, **change})

    monkeypatch.setattr(gpt_oss, "make_rope", wrong)
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _: None, id="none"),
        pytest.param(lambda sinks_H: mx.roll(sinks_H, 1), id="another-head's"),
        pytest.param(mx.zeros_like, id="zero"),
    ],
)
def test_wrong_sinks_are_found_in_the_first_attention(monkeypatch: Plant, change: Callable[[mx.array], Any]) -> None:
    right = gpt_oss.attend
    monkeypatch.setattr(
        gpt_oss, "attend", lambda *args, sinks_H, **given: right(*args, sinks_H=change(sinks_H), **given)
    )
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


def activation(*, limit: float = 7.0, slope: float = 1.702, offset: float = 1.0, low: float = -7.0) -> Any:
    def computed(gate: mx.array, up: mx.array) -> mx.array:
        gate = mx.minimum(gate, limit)
        return (mx.clip(up, low, limit) + offset) * (gate * mx.sigmoid(slope * gate))

    return computed


@needs_goldens
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        pytest.param({}, ("IDENTICAL", None), id="the-right-one"),
        pytest.param({"limit": 7.5}, ("DIFFERENT", EXPERTS), id="limit"),
        pytest.param({"low": -8.0}, ("DIFFERENT", EXPERTS), id="lower-limit"),
        pytest.param({"slope": 1.7}, ("DIFFERENT", EXPERTS), id="slope"),
        pytest.param({"offset": 0.0}, ("DIFFERENT", EXPERTS), id="offset"),
    ],
)
def test_another_activation_is_found_in_the_experts(monkeypatch: Plant, change: dict[str, float], seen: Any) -> None:
    right, other = GatedExperts.__call__, activation(**change)
    monkeypatch.setattr(GatedExperts, "__call__", lambda self, *given: right(replace(self, activation=other), *given))
    assert found(TAPS) == seen


@needs_goldens
def test_a_router_without_its_bias_is_found_there(monkeypatch: Plant) -> None:
    right = Linear.__call__

    def wrong(self: Linear, x: mx.array) -> mx.array:
        return right(replace(self, bias=None) if self.path.endswith("router") else self, x)

    monkeypatch.setattr(Linear, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.mlp.router")


@needs_goldens
def test_gate_and_up_rows_in_the_other_order_are_found(monkeypatch: Plant) -> None:
    right = expert_blocks.GatedExperts

    def wrong(**parts: Any) -> GatedExperts:
        return right(**{**parts, "gate": parts["up"], "up": parts["gate"]})

    monkeypatch.setattr(expert_blocks, "GatedExperts", wrong)
    assert found(HUB)[0] == "DIFFERENT"
