"""deepseek_v3: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import latent_attention, router
from engine.cache.convert import KVMode
from engine.errors import CheckpointError, ConfigError, RequestError
from engine.families import deepseek_v3
from engine.families.deepseek_v3 import FIXED, Config
from engine.generate import steps
from engine.latent_attention import LatentHeads
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.planted_norm import plant_norm
from tests.engine.families.tiny_snapshot import logits, logits_of, raw_config

TAPS = "deepseek_v3-tiny/f32/fp/forced/p40-taps-tail-split"
LOGITS = "deepseek_v3-tiny/f32/fp/forced/p40-tail-split"
AFTER_ATTENTION = "model.layers.0.self_attn.unembed_out"  # what the weighted sums of a single query go through
EXPERTS = "model.layers.1.mlp"  # the first layer is dense

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("deepseek_v3-tiny")


@pytest.fixture
def hub_copy(tmp_path: Path) -> Path:
    """A copy of the hub's layout that a test may change."""
    for file in ensure_snapshot("deepseek_v3-hub-tiny").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_joint_projection_and_experts_one_by_one_are_the_same_model(same_bits: Callable[..., None]) -> None:
    names = mx.load(str(ensure_snapshot("deepseek_v3-hub-tiny").path / "model.safetensors"))
    assert "model.layers.0.self_attn.kv_b_proj.weight" in names
    assert "model.layers.3.mlp.experts.7.up_proj.weight" in names
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" in names
    same_bits(logits_of("deepseek_v3-tiny"), logits_of("deepseek_v3-hub-tiny"))


def test_layers_that_predict_further_tokens_are_dropped_as_many_as_the_config_says(
    hub_copy: Path, edit_weights: Callable[..., None], edit_json: Callable[..., None], same_bits: Callable[..., None]
) -> None:
    edit_weights(hub_copy, {"model.layers.4.eh_proj.weight": mx.ones((2, 2))})
    same_bits(logits_of("deepseek_v3-tiny"), logits(hub_copy))
    edit_json(hub_copy / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"\n  tensors  model\.layers\.4\.eh_proj\.weight\n"):
        open_model(hub_copy, dtype="f32")


def test_layers_that_the_config_forgot_are_refused(hub_copy: Path, edit_json: Callable[..., None]) -> None:
    edit_json(hub_copy / "config.json", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"\n  tensors  model\.layers\.3\.input_layernorm\.weight, "):
        open_model(hub_copy, dtype="f32")


def test_every_layer_remembers_latents_and_they_cannot_be_packed() -> None:
    model = open_model(ensure_snapshot("deepseek_v3-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.vocabulary, model.head_width) == (512, 64)
    with pytest.raises(RequestError) as caught:
        steps(model, [1], num_steps=1, kv=KVMode(bits=8, group_size=32))
    assert str(caught.value) == (
        "the model's keys and values cannot be packed\n"
        "  reason  latents are multiplied outside attention too, where packed ones have no product\n"
        "  next    use the KV mode fp"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("scoring_func", "softmax"), ("tie_word_embeddings", True), ("topk_method", "greedy")],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"deepseek_v3 computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("moe_layer_freq", 0), ("kv_lora_rank", 0), ("qk_rope_head_dim", 31), ("num_attention_heads", 0)],
)
def test_sizes_that_do_not_fit_are_refused(raw: dict[str, Any], key: str, value: int) -> None:
    sizes = {
        "kv_lora_rank": 64,
        "moe_layer_freq": 1,
        "num_attention_heads": 4,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        key: value,
    }
    rows = "".join(f"  {name.replace('_', ' '):<19}  {size}\n" for name, size in sizes.items())
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"the sizes of config.json do not fit together\n{rows}  next                 mend config.json"
    )


def test_experts_that_do_not_fit_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "n_group": 3})
    assert str(caught.value) == (
        "the experts of config.json do not fit together\n"
        "  n routed experts     8\n"
        "  num experts per tok  2\n"
        "  n group              3\n"
        "  topk group           1\n"
        "  next                 mend config.json"
    )


def test_without_experts_their_numbers_do_not_matter(raw: dict[str, Any]) -> None:
    Config.read({**raw, "n_routed_experts": None, "n_group": 3})


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, "deepseek_v3_direct-tiny/f32/fp/forced/p40-taps-tail-split"])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize("change", [{"base": 10001.0}, {"traditional": False}, {"scaling": None}])
def test_another_rotation_is_found_in_the_first_attention(monkeypatch: Plant, change: dict[str, Any]) -> None:
    right = deepseek_v3.make_rope
    monkeypatch.setattr(deepseek_v3, "make_rope", lambda width, **given: right(width, **{**given, **change}))
    assert found(TAPS) == ("DIFFERENT", AFTER_ATTENTION)


@needs_goldens
def test_a_scale_without_the_temperature_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    monkeypatch.setattr(deepseek_v3, "latent_scale", lambda width, _scaling: width**-0.5)
    assert found(TAPS) == ("DIFFERENT", AFTER_ATTENTION)


@needs_goldens
def test_a_single_query_that_is_not_absorbed_is_found(monkeypatch: Plant) -> None:
    right = LatentHeads.attend

    def wrong(self: LatentHeads, own: mx.array, shared: mx.array, *cached: mx.array, **given: Any) -> mx.array:
        if own.shape[2] > 1:
            return right(self, own, shared, *cached, **given)
        twice = (mx.concatenate([part, part], axis=2) for part in (own, shared))  # two queries are reconstructed
        return right(self, *twice, *cached, **given)[:, -1:]

    monkeypatch.setattr(LatentHeads, "attend", wrong)
    assert found(LOGITS) == ("DIFFERENT", None)


@needs_goldens
def test_a_mask_that_shows_the_future_is_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr(deepseek_v3, "mask_of", lambda _cache, _L: None)
    status, earliest = found(TAPS)
    assert (status, earliest) == ("DIFFERENT", "model.layers.1.self_attn.unembed_out")  # layer 0 caches nothing wrong


@needs_goldens
@pytest.mark.parametrize("leaf", ["self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "post_attention_layernorm"])
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


@needs_goldens
@pytest.mark.parametrize("change", [{"factor": 1.501}, {"normalised": False}])
def test_other_weights_are_found_in_the_first_layer_of_experts(monkeypatch: Plant, change: dict[str, Any]) -> None:
    right = router.choose
    monkeypatch.setattr(router, "choose", lambda scores, bias, choice: right(scores, bias, replace(choice, **change)))
    assert found(TAPS) == ("DIFFERENT", EXPERTS)


@needs_goldens
def test_groups_that_are_ignored_are_found_in_the_first_layer_of_experts(monkeypatch: Plant) -> None:
    right = router.choose
    monkeypatch.setattr(router, "choose", lambda scores, bias, choice: right(scores, bias, replace(choice, groups=1)))
    assert found(TAPS) == ("DIFFERENT", f"{EXPERTS}.gate")


@needs_goldens
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda right, *given: tuple(part[..., ::-1] for part in right(*given)), id="order"),
        pytest.param(lambda right, scores, bias, choice: right(scores, -bias, choice), id="sign-of-the-correction"),
        pytest.param(
            lambda right, scores, bias, choice: right(scores, mx.roll(bias, 1), choice), id="others-correction"
        ),
    ],
)
def test_experts_in_another_order_or_otherwise_corrected_are_found_in_the_router(
    monkeypatch: Plant, wrong: Any
) -> None:
    right = router.choose
    monkeypatch.setattr(router, "choose", lambda *given: wrong(right, *given))
    assert found(TAPS) == ("DIFFERENT", f"{EXPERTS}.gate")


@needs_goldens
def test_a_correction_that_is_ignored_is_found_where_it_first_decided(monkeypatch: Plant) -> None:
    right = router.choose
    monkeypatch.setattr(router, "choose", lambda scores, bias, choice: right(scores, mx.zeros_like(bias), choice))
    # the last token chose the same experts in layer 1, an earlier one did not
    assert found(TAPS) == ("DIFFERENT", "model.layers.2.self_attn.unembed_out")


@needs_goldens
def test_shared_experts_left_out_are_found_in_the_first_layer_of_experts(monkeypatch: Plant) -> None:
    right = router.RoutedMLP.__call__

    def wrong(self: router.RoutedMLP, x: mx.array) -> mx.array:
        return right(self, x) - self.shared(x) if self.shared else right(self, x)

    monkeypatch.setattr(router.RoutedMLP, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.1")


@needs_goldens
def test_keys_and_values_cut_in_the_wrong_order_are_found(monkeypatch: Plant) -> None:
    right = latent_attention.split_joint_projection

    def wrong(checkpoint: Any, path: str, *, own: int, value: int, **given: int) -> None:
        joint = f"{path}.kv_b_proj.weight"
        if joint in checkpoint:
            checkpoint.replace([joint], [joint], lambda w: [mx.roll(w, own, axis=0)])
        right(checkpoint, path, own=own, value=value, **given)

    monkeypatch.setattr(latent_attention, "split_joint_projection", wrong)
    assert found("deepseek_v3-hub-tiny/f32/fp/forced/p40-tail-split")[0] == "DIFFERENT"
