"""qwen3_5: its wrapper, what it refuses, what its layers remember, all layouts, and planted faults."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import gated_delta, norm, qwen3_5_wrapper, short_convolution
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.families.qwen3_5 import Config, LinearAttention, Model
from engine.model import CausalModel, open_model
from engine.quantization import Quantization
from engine.taps import tap, watching
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import IDS, logits_in_pieces, raw_config

TAPS = "qwen3_5-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "qwen3_5-hub-tiny/f32/fp/forced/p40-tail-split"
BODY = "language_model.model"
LINEAR = f"{BODY}.layers.0.linear_attn"
FULL = f"{BODY}.layers.3.self_attn"

Plant = pytest.MonkeyPatch
Check = Callable[..., None]
Raw = dict[str, Any]


@pytest.fixture(scope="module")
def raw() -> Raw:
    return raw_config("qwen3_5-tiny")


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return open_model(ensure_snapshot("qwen3_5-tiny").path, dtype="f32")


def opened(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization())


def with_text(raw: Raw, **changes: Any) -> Raw:
    return raw | {"text_config": raw["text_config"] | changes}


def test_every_fourth_layer_remembers_all_positions_and_the_others_a_state(model: CausalModel) -> None:
    assert [cache.kind for cache in model.make_caches()] == ["arrays-2"] * 3 + ["plain"]


@pytest.mark.parametrize("cuts", [(1,), (3, 5), tuple(range(1, len(IDS)))])
def test_pieces_give_the_whole(model: CausalModel, same_bits: Check, cuts: tuple[int, ...]) -> None:
    same_bits(logits_in_pieces(model), logits_in_pieces(model, cuts=cuts))


def test_the_matrices_stay_float32_where_the_model_is_not(same_bits: Check) -> None:
    model = open_model(ensure_snapshot("qwen3_5-tiny").path, dtype="bf16")
    _, (first, *_) = model.hidden(mx.array([IDS]), model.make_caches())
    assert [array.dtype for array in first.arrays] == [mx.bfloat16, mx.float32]
    same_bits(logits_in_pieces(model), logits_in_pieces(model, cuts=(4,)))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_hub_snapshot_is_the_converted_one(same_bits: Check, dtype: Any) -> None:
    converted, hub = (open_model(ensure_snapshot(f"qwen3_5{form}-tiny").path, dtype=dtype) for form in ("", "-hub"))
    same_bits(logits_in_pieces(converted), logits_in_pieces(hub))


def test_a_text_model_of_its_own_is_the_wrapped_one(
    raw: Raw, model: CausalModel, same_bits: Check, tmp_path: Path
) -> None:
    source = mx.load(str(ensure_snapshot("qwen3_5-tiny").path / "model.safetensors"))
    assert isinstance(source, dict)
    bare = {name.removeprefix("language_model."): array for name, array in source.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), bare)
    same_bits(logits_in_pieces(model), logits_in_pieces(Model.build(raw["text_config"], opened(tmp_path))))


def test_a_tensor_under_two_names_is_refused(raw: Raw, tmp_path: Path) -> None:
    source = mx.load(str(ensure_snapshot("qwen3_5-tiny").path / "model.safetensors"))
    assert isinstance(source, dict)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), source | {"model.norm.weight": mx.zeros((128,))})
    with pytest.raises(CheckpointError) as caught:
        Model.build(raw, opened(tmp_path))
    assert str(caught.value) == (
        "the checkpoint mixes two layouts\n"
        "  missing        nothing\n"
        "  there already  language_model.model.norm.weight\n"
        "  next           take a snapshot as the hub has it, or one that is converted throughout"
    )


def test_a_filter_of_the_other_layout_among_the_hubs_is_refused(raw: Raw, tmp_path: Path) -> None:
    source = mx.load(str(ensure_snapshot("qwen3_5-hub-tiny").path / "model.safetensors"))
    assert isinstance(source, dict)
    name = "model.language_model.layers.1.linear_attn.conv1d.weight"
    mx.save_safetensors(str(tmp_path / "model.safetensors"), source | {name: source[name].swapaxes(1, 2)})
    with pytest.raises(CheckpointError) as caught:
        Model.build(raw, opened(tmp_path))
    assert str(caught.value) == (
        "tensor language_model.model.layers.1.linear_attn.conv1d.weight has the wrong shape\n"
        "  expected  [448, 1, 4]\n"
        "  found     [448, 4, 1]\n"
        "  next      take the weights that belong to this config.json"
    )


def test_every_module_path_is_that_of_a_converted_tensor(model: CausalModel) -> None:
    tensors = mx.load(str(ensure_snapshot("qwen3_5-tiny").path / "model.safetensors"))
    assert isinstance(tensors, dict)
    seen: list[str] = []
    with watching(lambda path, _: seen.append(path)):
        logits_in_pieces(model)
    assert len(seen) == len(set(seen))
    assert [path for path in seen if not any(name.startswith(f"{path}.") for name in tensors)] == []
    held = {name.rpartition(".")[0] for name in tensors}
    assert held <= set(seen)
    assert {"language_model", BODY} <= set(seen)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"tie_word_embeddings": False}, "language_model.lm_head.weight"),
        ({"attention_bias": True}, f"{FULL}.q_proj.bias"),
    ],
)
def test_what_the_config_asks_for_must_be_there(raw: Raw, changes: dict[str, Any], missing: str) -> None:
    asked = with_text(raw, **changes)
    asked["tie_word_embeddings"] = asked["text_config"]["tie_word_embeddings"]
    with pytest.raises(CheckpointError) as caught:
        Model.build(asked, opened(ensure_snapshot("qwen3_5-tiny").path))
    assert caught.value.what == f"the checkpoint has no tensor {missing}"


def test_a_head_beside_a_tied_embedding_is_left_out(
    raw: Raw, model: CausalModel, same_bits: Check, tmp_path: Path
) -> None:
    source = mx.load(str(ensure_snapshot("qwen3_5-hub-tiny").path / "model.safetensors"))
    assert isinstance(source, dict)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), source | {"lm_head.weight": mx.zeros((512, 128))})
    same_bits(logits_in_pieces(model), logits_in_pieces(Model.build(raw, opened(tmp_path))))


# the config


def test_heads_default_to_the_width_over_their_number(raw: Raw) -> None:
    text = {key: value for key, value in raw["text_config"].items() if key != "head_dim"}
    assert (Config.read(raw).head_width, Config.read(raw | {"text_config": text}).head_width) == (64, 32)


def test_the_rotation_is_that_of_the_config(raw: Raw) -> None:
    rotation = Config.read(raw).rotation
    assert (rotation.width, rotation.base, dict(rotation.scaling)) == (16, 1e7, {"rope_type": "default"})


def test_without_rope_parameters_the_rotation_is_the_oracles_own(raw: Raw) -> None:
    rotation = Config.read(with_text(raw, rope_parameters=None)).rotation
    assert (rotation.width, rotation.base, dict(rotation.scaling)) == (16, 1e5, {})


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 0), ("partial_rotary_factor", "0.25")])
def test_a_rotation_that_is_no_number_is_refused(raw: Raw, key: str, value: object) -> None:
    parameters = raw["text_config"]["rope_parameters"] | {key: value}
    with pytest.raises(ConfigError) as caught:
        Config.read(with_text(raw, rope_parameters=parameters))
    assert str(caught.value) == (
        "rope_parameters has a value that is no positive number\n"
        f"  key    {key}\n"
        f"  value  {value}\n"
        "  next   mend config.json"
    )


def test_an_unknown_rope_parameter_is_refused(raw: Raw) -> None:
    parameters = raw["text_config"]["rope_parameters"] | {"mrope_sections": [3]}
    with pytest.raises(ConfigError, match=r"^rope scaling 'default' is not as expected\n"):
        Model.build(with_text(raw, rope_parameters=parameters), opened(ensure_snapshot("qwen3_5-tiny").path))


def test_a_wrapper_that_contradicts_its_text_config_is_refused(raw: Raw) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read(raw | {"tie_word_embeddings": False})
    assert str(caught.value) == (
        "config.json and its text_config contradict each other\n"
        "  tie word embeddings  False\n"
        "  in text config       True\n"
        "  next                 mend config.json"
    )


def test_a_wrapper_may_have_a_vision_part_and_nothing_unknown(raw: Raw) -> None:
    assert Config.read(raw | {"vision_config": {"depth": 2}, "image_token_id": 7}) == Config.read(raw)
    with pytest.raises(ConfigError, match=r"^config key 'audio_config' is unknown to model_type 'qwen3_5'\n"):
        Config.read(raw | {"audio_config": {}})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attn_output_gate", False, "true"),
        ("hidden_act", "gelu", '"silu"'),
        ("mamba_ssm_dtype", "bfloat16", '"float32"'),
        ("mlp_only_layers", [1], "[]"),
        ("decoder_sparse_step", 2, "1"),
    ],
)
def test_what_the_family_does_not_compute_is_refused(raw: Raw, key: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read(with_text(raw, **{key: value}))
    assert str(caught.value) == (
        f"qwen3_5_text computes {key} {expected} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"full_attention_interval": 3}, "layer_types and full_attention_interval contradict each other"),
        ({"linear_num_value_heads": 3}, "the heads of the linear layers do not fit together"),
        ({"num_key_value_heads": 3}, "the heads of config.json do not fit together"),
        ({"num_experts": 8}, "config key 'num_experts' is unknown to model_type 'qwen3_5_text'"),
    ],
)
def test_what_does_not_fit_is_refused(raw: Raw, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read(with_text(raw, **changes))
    assert caught.value.what == what


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize("changes", [{"base": 9_990_000.0}, {"width": 64}], ids=["base", "whole-head"])
def test_another_rotation_is_found_in_the_layer_of_attention(monkeypatch: Plant, changes: dict[str, Any]) -> None:
    right = qwen3_5_wrapper.make_rope
    monkeypatch.setattr(
        qwen3_5_wrapper, "make_rope", lambda width, **given: right(**{"width": width, **given, **changes})
    )
    assert found(TAPS) == ("DIFFERENT", f"{FULL}.o_proj")


@needs_goldens
@pytest.mark.parametrize("leaf", ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"])
def test_an_eps_that_is_off_is_found_in_its_norm(monkeypatch: Plant, leaf: str) -> None:
    right = norm.RMSNorm.__call__

    def wrong(self: norm.RMSNorm, x: mx.array) -> mx.array:
        return right(replace(self, eps=self.eps * 10) if self.path.endswith(leaf) else self, x)

    monkeypatch.setattr(norm.RMSNorm, "__call__", wrong)
    first = f"{FULL}.{leaf}" if leaf.endswith("_norm") else f"{BODY}.layers.0.{leaf}"
    assert found(TAPS) == ("DIFFERENT", first)


@needs_goldens
@pytest.mark.parametrize("leaf", ["q_norm", "k_norm"])
def test_a_skipped_norm_of_queries_or_keys_is_found_there(monkeypatch: Plant, leaf: str) -> None:
    right = norm.RMSNorm.__call__
    monkeypatch.setattr(
        norm.RMSNorm, "__call__", lambda self, x: tap(self.path, x) if self.path.endswith(leaf) else right(self, x)
    )
    assert found(TAPS) == ("DIFFERENT", f"{FULL}.{leaf}")


@needs_goldens
def test_a_convolution_that_forgets_is_found_in_it(monkeypatch: Plant) -> None:
    right = short_convolution.ShortConvolution.__call__
    monkeypatch.setattr(
        short_convolution.ShortConvolution,
        "__call__",
        lambda self, x, state, _ends=None: right(self, x, None if state is None else mx.zeros_like(state)),
    )
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.conv1d")


@needs_goldens
def test_queries_scaled_once_only_are_found_in_the_norm_after(monkeypatch: Plant) -> None:
    right = gated_delta.unit_queries_and_keys

    def wrong(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        unscaled, k = right(q, k)
        return unscaled * q.shape[-1] ** 0.5, k

    monkeypatch.setattr(gated_delta, "unit_queries_and_keys", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.norm")


@needs_goldens
def test_matrices_in_bfloat16_are_found_in_the_norm_after(monkeypatch: Plant) -> None:
    right = gated_delta.gated_delta

    def wrong(*heads: mx.array, **rest: Any) -> tuple[mx.array, mx.array]:
        y, state = right(*heads, **rest)
        return y, state.astype(mx.bfloat16).astype(mx.float32)

    monkeypatch.setattr(gated_delta, "gated_delta", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.norm")


@needs_goldens
def test_decay_and_correction_that_are_swapped_are_found_in_the_norm_after(monkeypatch: Plant) -> None:
    right = LinearAttention.__call__
    monkeypatch.setattr(
        LinearAttention, "__call__", lambda self, x, cache: right(replace(self, a=self.b, b=self.a), x, cache)
    )
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.norm")


@needs_goldens
@pytest.mark.parametrize("where", ["skipped", "after the cast"])
def test_a_hubs_norm_without_its_one_or_with_one_added_too_late_is_seen(monkeypatch: Plant, where: str) -> None:
    right = norm.RMSNorm.take

    def wrong(checkpoint: Checkpoint, path: str, **given: Any) -> norm.RMSNorm:
        given.pop("stored_less_one", None)
        taken = right(checkpoint, path, **given)
        return replace(taken, weight=taken.weight + 1) if where == "after the cast" else taken

    assert found(HUB) == ("IDENTICAL", None)
    monkeypatch.setattr(norm.RMSNorm, "take", wrong)
    assert found(HUB) == ("DIFFERENT", None)
