"""qwen3_5_moe: what it refuses, both layouts of its experts, and planted faults of its router and experts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import gated_delta, qwen3_5_wrapper, shared_expert_moe, short_convolution
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.families import qwen3_5_moe
from engine.families.qwen3_5_moe import Config, Model
from engine.model import CausalModel, open_model
from engine.quantization import Quantization
from engine.shared_expert_moe import SharedExpertMoE
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import IDS, logits_in_pieces, raw_config

TAPS = "qwen3_5_moe-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "qwen3_5_moe-hub-tiny/f32/fp/forced/p40-tail-split"
BODY = "language_model.model"
MLP = f"{BODY}.layers.0.mlp"
LINEAR = f"{BODY}.layers.0.linear_attn"

Plant = pytest.MonkeyPatch
Check = Callable[..., None]
Raw = dict[str, Any]


@pytest.fixture(scope="module")
def raw() -> Raw:
    return raw_config("qwen3_5_moe-tiny")


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return open_model(ensure_snapshot("qwen3_5_moe-tiny").path, dtype="f32")


def with_text(raw: Raw, **changes: Any) -> Raw:
    return raw | {"text_config": raw["text_config"] | changes}


def build(raw: Raw, folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Model:
    """A model of the hub's snapshot with some tensors changed."""
    source = mx.load(str(ensure_snapshot("qwen3_5_moe-hub-tiny").path / "model.safetensors"))
    assert isinstance(source, dict)
    mx.save_safetensors(str(folder / "model.safetensors"), change(source))
    return Model.build(raw, Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization()))


def test_every_fourth_layer_remembers_all_positions_and_the_others_a_state(model: CausalModel) -> None:
    assert [cache.kind for cache in model.make_caches()] == ["arrays-2"] * 3 + ["plain"]


@pytest.mark.parametrize("cuts", [(1,), (3, 5), tuple(range(1, len(IDS)))])
def test_pieces_give_the_whole(model: CausalModel, same_bits: Check, cuts: tuple[int, ...]) -> None:
    same_bits(logits_in_pieces(model), logits_in_pieces(model, cuts=cuts))


def test_a_hub_snapshot_is_the_converted_one(model: CausalModel, same_bits: Check) -> None:
    same_bits(
        logits_in_pieces(model), logits_in_pieces(open_model(ensure_snapshot("qwen3_5_moe-hub-tiny").path, dtype="f32"))
    )


def test_the_weights_of_the_chosen_are_normalised_unless_the_config_says_no(raw: Raw) -> None:
    text = {key: value for key, value in raw["text_config"].items() if key != "norm_topk_prob"}
    assert not Config.read(raw).expert_sizes.normalised
    assert Config.read(raw | {"text_config": text}).expert_sizes.normalised
    assert Config.read(with_text(raw, norm_topk_prob=True)).expert_sizes.normalised


def test_a_head_of_its_own_is_left_out_where_the_embedding_serves(raw: Raw, tmp_path: Path, same_bits: Check) -> None:
    tied = build(with_text(raw, tie_word_embeddings=True) | {"tie_word_embeddings": True}, tmp_path, dict)
    assert tied.head is None
    hidden, _ = tied.hidden(mx.array([IDS]), tied.make_caches())
    same_bits(tied.embedding.as_head(hidden), tied.logits(hidden))


@pytest.mark.parametrize("key", ["num_experts_per_tok", "num_experts"])
def test_a_choice_of_no_experts_is_refused(raw: Raw, key: str) -> None:
    with pytest.raises(ConfigError, match=r"^the experts of config\.json do not fit together\n"):
        Config.read(with_text(raw, **{key: 0}))


def test_a_dense_layer_is_refused(raw: Raw) -> None:
    with pytest.raises(ConfigError, match=r"^qwen3_5_moe_text computes mlp_only_layers \[\] only\n"):
        Config.read(with_text(raw, mlp_only_layers=[0]))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"full_attention_interval": 3}, "layer_types and full_attention_interval contradict each other"),
        ({"linear_num_value_heads": 3}, "the heads of the linear layers do not fit together"),
        ({"num_key_value_heads": 3}, "the heads of config.json do not fit together"),
        ({"intermediate_size": 8}, "config key 'intermediate_size' is unknown to model_type 'qwen3_5_moe_text'"),
    ],
)
def test_what_does_not_fit_is_refused(raw: Raw, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read(with_text(raw, **changes))
    assert caught.value.what == what


def test_joined_experts_of_another_shape_are_refused(raw: Raw, tmp_path: Path) -> None:
    name = "model.language_model.layers.2.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError) as caught:
        build(raw, tmp_path, lambda tensors: tensors | {name: tensors[name][:, 1:]})
    assert str(caught.value) == (
        "tensor language_model.model.layers.2.mlp.experts.gate_up_proj has the wrong shape\n"
        "  expected  [8, 128, 128]\n"
        "  found     [8, 127, 128]\n"
        "  next      take the weights that belong to this config.json"
    )


def test_joined_experts_without_the_projection_down_are_refused(raw: Raw, tmp_path: Path) -> None:
    name = "model.language_model.layers.2.mlp.experts.down_proj"
    with pytest.raises(CheckpointError) as caught:
        build(raw, tmp_path, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})
    assert str(caught.value) == (
        "the checkpoint mixes two layouts\n"
        "  missing        language_model.model.layers.2.mlp.experts.down_proj\n"
        "  there already  nothing\n"
        "  next           take a snapshot as the hub has it, or one that is converted throughout"
    )


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)
    assert found(HUB) == ("IDENTICAL", None)


@needs_goldens
def test_weights_that_are_normalised_unasked_are_found_in_the_layer(monkeypatch: Plant) -> None:
    right = SharedExpertMoE.__call__
    monkeypatch.setattr(
        SharedExpertMoE,
        "__call__",
        lambda self, x: right(replace(self, sizes=replace(self.sizes, normalised=True)), x),
    )
    assert found(TAPS) == ("DIFFERENT", MLP)


@needs_goldens
@pytest.mark.parametrize("scale", [1.01, 1 + 2**-20])
def test_a_router_scale_that_is_off_is_found_in_the_layer(monkeypatch: Plant, scale: float) -> None:
    right = shared_expert_moe.weighted_sum
    monkeypatch.setattr(shared_expert_moe, "weighted_sum", lambda outputs, weights: right(outputs, weights * scale))
    assert found(TAPS) == ("DIFFERENT", MLP)


@needs_goldens
def test_an_activation_of_the_wrong_half_is_found_in_the_experts(monkeypatch: Plant) -> None:
    right = SharedExpertMoE.__call__

    def wrong(self: SharedExpertMoE, x: mx.array) -> mx.array:
        return right(replace(self, experts=replace(self.experts, gate=self.experts.up, up=self.experts.gate)), x)

    monkeypatch.setattr(SharedExpertMoE, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{MLP}.switch_mlp")


@needs_goldens
def test_halves_of_the_hubs_experts_that_are_swapped_are_seen(monkeypatch: Plant) -> None:
    right = Checkpoint.replace

    def wrong(self: Checkpoint, old: Any, new: Any, how: Any) -> None:
        right(self, old, [new[1], new[0], new[2]] if len(new) == 3 else new, how)

    monkeypatch.setattr(Checkpoint, "replace", wrong)
    assert found(HUB) == ("DIFFERENT", None)


@needs_goldens
def test_another_base_of_the_rotation_is_found_in_the_layer_of_attention(monkeypatch: Plant) -> None:
    right = qwen3_5_wrapper.make_rope
    monkeypatch.setattr(
        qwen3_5_wrapper, "make_rope", lambda width, **given: right(width, **(given | {"base": given["base"] * 1.001}))
    )
    assert found(TAPS) == ("DIFFERENT", f"{BODY}.layers.3.self_attn.o_proj")


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
def test_an_eps_of_units_that_is_not_scaled_is_found_in_the_norm_after(monkeypatch: Plant) -> None:
    monkeypatch.setattr(gated_delta, "UNIT_EPS", gated_delta.UNIT_EPS * 64)
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.norm")


@needs_goldens
def test_layers_of_attention_one_too_early_are_seen(monkeypatch: Plant) -> None:
    monkeypatch.setattr(qwen3_5_moe.Config, "is_linear", lambda self, layer: layer % self.full_attention_interval != 2)
    assert found(TAPS)[0] == "ERROR"  # the checkpoint has no such tensors
