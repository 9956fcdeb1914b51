"""gemma4_text in its three shapes: refusals, both layouts, caches, and planted faults seen where they begin."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import parallel_experts, per_layer_input, shared_kv_attention
from engine.cache.convert import KVMode
from engine.cache.rotating import RotatingCache
from engine.errors import ConfigError
from engine.families import gemma4_text
from engine.families.gemma4_text import Block, Config
from engine.generate import steps
from engine.model import open_model
from engine.norm import RMSNorm
from engine.parallel_experts import ScaledRouter
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits_of, raw_config

DENSE = "gemma4_text-tiny/f32/fp/forced/p40-taps-tail-split"
MOE = "gemma4_text_moe-tiny/f32/fp/forced/p40-taps-tail-split"
SHARED = "gemma4_text_ple_kvshared-tiny/f32/fp/forced/p40-taps-tail-split"
SLIDING = "model.layers.0.self_attn.o_proj"  # the first projection after attention of a layer with a window

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("gemma4_text-tiny")


@pytest.mark.parametrize("config", ["gemma4_text", "gemma4_text_moe", "gemma4_text_ple_kvshared"])
def test_both_layouts_are_one_model(same_bits: Callable[..., None], config: str) -> None:
    same_bits(logits_of(f"{config}-tiny"), logits_of(f"{config}-hub-tiny"))


def test_layers_remember_a_window_or_all() -> None:
    model = open_model(ensure_snapshot("gemma4_text-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0", "rotating-w16-k0", "plain"] * 2
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


def test_layers_that_share_remember_nothing_and_read_packed_keys_too() -> None:
    model = open_model(ensure_snapshot("gemma4_text_ple_kvshared-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0", "plain"] * 2
    (step,) = steps(model, [1, 2], num_steps=1, kv=KVMode(bits=8))
    assert [cache.kind for cache in step.caches] == ["rotating-quantized-w16-k0-b8-g64", "quantized-b8-g64"] * 2


def test_without_layer_types_every_fifth_layer_is_full(raw: dict[str, Any]) -> None:
    del raw["layer_types"]
    assert [kind.split("_")[0] for kind in Config.read(raw).kinds] == ["sliding"] * 4 + ["full", "sliding"]


def test_without_rope_parameters_the_usual_two_rotations_are_taken(raw: dict[str, Any]) -> None:
    config = Config.read({key: value for key, value in raw.items() if key != "rope_parameters"})
    for kind in config.kinds:
        default, written = config.rope(kind), Config.read(raw).rope(kind)
        assert (default.width, default.base) == (written.width, written.base)
        assert str(default.periods) == str(written.periods)


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("attention_bias", True, "False"),
        ("hidden_activation", "silu", "gelu_pytorch_tanh"),
        ("use_bidirectional_attention", "all", "False, None, vision"),
    ],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"gemma4_text does not compute this {key}\n  found  {value}\n  known  {known}\n  next   mend config.json"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_key_value_heads": 3},
            (
                "gemma4_text needs heads that fit together\n"
                "  layers               sliding_attention\n"
                "  num attention heads  4\n"
                "  key value heads      3\n"
                "  next                 mend config.json"
            ),
        ),
        (
            {"sliding_window": 0, "layer_types": ["full_attention"] * 5},
            (
                "gemma4_text needs layers and a window\n"
                f"  layer types        {', '.join(['full_attention'] * 5)}\n"
                "  num hidden layers  6\n"
                "  sliding window     0\n"
                "  next               mend config.json"
            ),
        ),
        (
            {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 511},
            (
                "gemma4_text needs per-layer inputs for every id\n"
                "  vocab size                  512\n"
                "  vocab size per layer input  511\n"
                "  next                        mend config.json"
            ),
        ),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 64},
            (
                "gemma4_text needs numbers of experts\n"
                "  num experts            4\n"
                "  top k experts          5\n"
                "  moe intermediate size  64\n"
                "  next                   mend config.json"
            ),
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(raw: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == message


def test_layers_without_a_donor_are_refused(raw: dict[str, Any]) -> None:
    kinds = ["full_attention"] * 4 + ["sliding_attention"] * 2
    with pytest.raises(ConfigError, match=r"the layers of config\.json do not fit together"):
        Config.read({**raw, "layer_types": kinds, "num_kv_shared_layers": 2})


def test_a_partial_rotation_of_another_form_is_refused(raw: dict[str, Any]) -> None:
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    config = Config.read({**raw, "rope_parameters": ropes})
    with pytest.raises(ConfigError) as caught:
        config.rope("sliding_attention")
    assert str(caught.value) == (
        "gemma4_text turns a part of the head only where rope_type is proportional\n"
        "  layers  sliding_attention\n"
        "  next    mend config.json"
    )


def test_projections_of_a_layer_that_has_its_own_are_not_dropped(
    tmp_path: Path, edit_weights: Callable[..., None]
) -> None:
    for file in ensure_snapshot("gemma4_text-tiny").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_weights(tmp_path, {"model.layers.2.self_attn.v_proj.weight": mx.zeros((128, 128))})
    with pytest.raises(Exception, match=r"model\.layers\.2\.self_attn\.v_proj\.weight"):
        open_model(tmp_path, dtype="f32")


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [DENSE, MOE, SHARED])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize("name", [DENSE, MOE, SHARED])
def test_a_window_off_by_one_is_found_in_the_first_attention(monkeypatch: Plant, name: str) -> None:
    right = RotatingCache.mask
    monkeypatch.setattr(RotatingCache, "mask", lambda self, L, *, window: right(self, L, window=window and window - 1))
    assert found(name) == ("DIFFERENT", SLIDING)


@needs_goldens
@pytest.mark.parametrize(
    ("kind", "changes", "earliest"),
    [
        ("sliding_attention", {"rope_theta": 10010.0}, SLIDING),
        ("full_attention", {"rope_theta": 1001000.0}, "model.layers.2.self_attn.o_proj"),
        ("full_attention", {"partial_rotary_factor": 0.5}, "model.layers.2.self_attn.o_proj"),
        ("full_attention", {"factor": 2.0}, "model.layers.2.self_attn.o_proj"),
    ],
)
def test_another_rotation_is_found_in_the_first_attention_that_has_it(
    monkeypatch: Plant, kind: str, changes: dict[str, float], earliest: str
) -> None:
    right = Config.rope

    def wrong(self: Config, asked: str) -> Any:
        ropes = json.loads(json.dumps(self.rope_parameters))
        ropes[kind] |= changes
        return right(replace(self, rope_parameters=ropes), asked)

    monkeypatch.setattr(Config, "rope", wrong)
    assert found(DENSE) == ("DIFFERENT", earliest)


@needs_goldens
def test_scaled_scores_are_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = shared_kv_attention.attend
    monkeypatch.setattr(
        shared_kv_attention, "attend", lambda q, k, v, *, scale, mask: right(q, k, v, scale=scale / 8, mask=mask)
    )
    assert found(DENSE) == ("DIFFERENT", SLIDING)


@needs_goldens
def test_values_that_are_not_normalised_are_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = mx.fast.rms_norm
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, w, eps: x if w is None else right(x, w, eps))
    assert found(DENSE) == ("DIFFERENT", SLIDING)


@needs_goldens
@pytest.mark.parametrize("leaf", ["self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _norm, x: x, id="skipped"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, norm.eps * 2), id="eps"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, 1 + norm.weight, norm.eps), id="offset"),
    ],
)
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, leaf: str, change: Callable[..., mx.array]) -> None:
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        return tap(self.path, change(self, x)) if self.path.endswith(leaf) else right(self, x)

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(DENSE) == ("DIFFERENT", f"model.layers.0.{leaf}")


@needs_goldens
@pytest.mark.parametrize("name", [DENSE, SHARED])
def test_a_layer_without_its_scalar_is_found_in_its_output(monkeypatch: Plant, name: str) -> None:
    right = Block.__call__
    monkeypatch.setattr(
        Block, "__call__", lambda self, *args: right(replace(self, scalar=mx.ones_like(self.scalar)), *args)
    )
    assert found(name) == ("DIFFERENT", "model.layers.0")


@needs_goldens
def test_another_cap_of_the_logits_is_found_in_them_alone(monkeypatch: Plant) -> None:
    right = gemma4_text.soft_capped
    monkeypatch.setattr(gemma4_text, "soft_capped", lambda x, cap: right(x, cap - 1))
    assert found(DENSE) == ("DIFFERENT", None)


right_router = ScaledRouter.__call__


def weights_of_all(self: ScaledRouter, x: mx.array) -> tuple[mx.array, mx.array]:
    scores = self.projection(mx.fast.rms_norm(x, self.scale * x.shape[-1] ** -0.5, self.eps))
    experts = tap(self.path, mx.argpartition(scores, kth=-self.chosen, axis=-1)[..., -self.chosen :])
    shares = mx.take_along_axis(mx.softmax(scores, axis=-1), experts, axis=-1)
    return experts, shares * self.expert_scale[experts]


@needs_goldens
@pytest.mark.parametrize(
    ("change", "earliest"),
    [
        pytest.param(lambda r: replace(r, scale=r.scale * 1.5), "router.proj", id="scale"),
        pytest.param(lambda r: replace(r, eps=r.eps * 2), "router.proj", id="eps"),
        pytest.param(lambda r: replace(r, expert_scale=mx.ones_like(r.expert_scale)), "experts", id="expert-scale"),
    ],
)
def test_a_router_with_another_number_is_found(
    monkeypatch: Plant, change: Callable[[ScaledRouter], ScaledRouter], earliest: str
) -> None:
    right = ScaledRouter.__call__
    monkeypatch.setattr(ScaledRouter, "__call__", lambda self, x: right(change(self), x))
    assert found(MOE) == ("DIFFERENT", f"model.layers.0.{earliest}")


def other_experts(self: ScaledRouter, x: mx.array) -> tuple[mx.array, mx.array]:
    experts, weights = right_router(self, x)
    return tap(self.path, (experts + 1) % 8), weights


def in_reverse_order(self: ScaledRouter, x: mx.array) -> tuple[mx.array, mx.array]:
    experts, weights = right_router(self, x)
    return tap(self.path, experts[..., ::-1]), weights[..., ::-1]


@needs_goldens
@pytest.mark.parametrize(
    ("wrong", "earliest"), [(weights_of_all, "experts"), (other_experts, "router"), (in_reverse_order, "router")]
)
def test_a_router_that_weighs_or_chooses_otherwise_is_found(monkeypatch: Plant, wrong: Any, earliest: str) -> None:
    monkeypatch.setattr(ScaledRouter, "__call__", wrong)
    assert found(MOE) == ("DIFFERENT", f"model.layers.0.{earliest}")


@needs_goldens
def test_experts_with_another_activation_are_found_there(monkeypatch: Plant) -> None:
    monkeypatch.setattr(parallel_experts, "geglu_approx", lambda gate, up: mx.sigmoid(gate) * gate * up)
    assert found(MOE) == ("DIFFERENT", "model.layers.0.experts.switch_glu")


@needs_goldens
def test_an_earlier_donor_of_keys_and_values_is_found_in_the_first_layer_that_reads_them(monkeypatch: Plant) -> None:
    def first_of_its_kind(kinds: tuple[str, ...], *, shared: int) -> tuple[int, ...]:
        own = len(kinds) - shared
        return tuple(i if i < own else kinds.index(kinds[i]) for i in range(len(kinds)))

    monkeypatch.setattr(gemma4_text, "donors", first_of_its_kind)
    assert found(SHARED) == ("DIFFERENT", "model.layers.4.self_attn.o_proj")


@needs_goldens
@pytest.mark.parametrize(
    ("change", "earliest"),
    [
        pytest.param(lambda p: replace(p, width=p.width * 2), "model.per_layer_projection_norm", id="width"),
        pytest.param(lambda p: replace(p, vocabulary=1), "model.embed_tokens_per_layer", id="vocabulary"),
    ],
)
def test_per_layer_inputs_of_another_number_are_found(
    monkeypatch: Plant, change: Callable[..., Any], earliest: str
) -> None:
    right = per_layer_input.PerLayerInputs.__call__
    monkeypatch.setattr(per_layer_input.PerLayerInputs, "__call__", lambda self, *args: right(change(self), *args))
    assert found(SHARED) == ("DIFFERENT", earliest)


@needs_goldens
def test_per_layer_inputs_in_another_order_are_found_in_the_first_that_differs(monkeypatch: Plant) -> None:
    right = per_layer_input.PerLayerInputs.__call__
    monkeypatch.setattr(per_layer_input.PerLayerInputs, "__call__", lambda self, *args: right(self, *args)[::-1])
    assert found(SHARED) == ("DIFFERENT", "model.layers.0.per_layer_projection")
