"""kimi_linear: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine import delta_attention, router
from engine.cache.convert import KVMode
from engine.errors import ConfigError, RequestError
from engine.families import kimi_linear
from engine.families.kimi_linear import FIXED, Config
from engine.generate import steps
from engine.model import open_model
from engine.norm import RMSNorm
from engine.short_convolution import ShortConvolution
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits_of, raw_config

TAPS = "kimi_linear-tiny/f32/fp/forced/p40-taps-tail-split"
TIED = "kimi_linear_tied-tiny/f32/fp/forced/p40-taps-tail-split"
DELTA = "model.layers.0.self_attn"
LATENT = "model.layers.3.self_attn"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("kimi_linear-tiny")


def test_both_layouts_are_one_model(same_bits: Callable[..., None]) -> None:
    names = mx.load(str(ensure_snapshot("kimi_linear-hub-tiny").path / "model.safetensors"))
    assert "model.layers.1.block_sparse_moe.experts.7.w3.weight" in names
    assert "model.layers.1.block_sparse_moe.gate.e_score_correction_bias" in names
    assert names["model.layers.0.self_attn.q_conv1d.weight"].shape == (256, 1, 4)  # type: ignore[index]
    same_bits(logits_of("kimi_linear-tiny"), logits_of("kimi_linear-hub-tiny"))


def test_delta_layers_remember_four_arrays_and_latent_ones_all() -> None:
    model = open_model(ensure_snapshot("kimi_linear-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["arrays-4"] * 3 + ["plain"]
    assert (model.vocabulary, model.head_width) == (512, 64)
    with pytest.raises(RequestError, match="latents are multiplied outside attention too"):
        steps(model, [1], num_steps=1, kv=KVMode(bits=8, group_size=32))


def test_a_layer_that_is_handed_the_wrong_cache_says_so() -> None:
    model = open_model(ensure_snapshot("kimi_linear-tiny").path, dtype="f32")
    caches = model.make_caches()[::-1]
    with pytest.raises(TypeError, match="a layer of delta attention was handed a cache of kind plain"):
        model.hidden(mx.array([[1]]), caches)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("mla_use_nope", False),
        ("moe_router_activation_func", "softmax"),
        ("q_lora_rank", 64),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("use_grouped_topk", False),
    ],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"kimi_linear computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize(
    ("changes", "heads", "width", "kernel", "layers"),
    [
        ({"kda_layers": [1, 2]}, 4, 64, 4, "1, 2, 4"),
        ({"kda_layers": [1, 2, 3, 4]}, 4, 64, 4, "1, 2, 3, 4, 4"),
        ({"short_conv_kernel_size": 1}, 4, 64, 1, "1, 2, 3, 4"),
        ({"num_heads": 0}, 0, 64, 4, "1, 2, 3, 4"),
    ],
)
def test_delta_layers_that_do_not_fit_are_refused(
    *, raw: dict[str, Any], changes: dict[str, Any], heads: int, width: int, kernel: int, layers: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "linear_attn_config": {**raw["linear_attn_config"], **changes}})
    assert str(caught.value) == (
        "linear_attn_config of config.json does not fit together\n"
        f"  num heads               {heads}\n"
        f"  head dim                {width}\n"
        f"  short conv kernel size  {kernel}\n"
        f"  layers in lists         {layers}\n"
        "  num hidden layers       4\n"
        "  next                    mend config.json"
    )


def test_an_unknown_key_of_the_delta_layers_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"'lower_bound' is unknown to model_type 'kimi_linear \(linear_attn_config\)'"
    ):
        Config.read({**raw, "linear_attn_config": {**raw["linear_attn_config"], "lower_bound": -5}})


def test_sizes_and_experts_that_do_not_fit_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the sizes of config\.json do not fit together"):
        Config.read({**raw, "moe_layer_freq": 0})
    with pytest.raises(ConfigError, match=r"the experts of config\.json do not fit together\n  num experts  "):
        Config.read({**raw, "num_expert_group": 3})


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, TIED])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
def test_a_convolution_that_forgets_is_found_there(monkeypatch: Plant) -> None:
    right = ShortConvolution.__call__
    monkeypatch.setattr(ShortConvolution, "__call__", lambda self, x, _: right(self, x, None))
    assert found(TAPS) == ("DIFFERENT", f"{DELTA}.q_conv.conv")


@needs_goldens
def test_filters_turned_round_are_found_there(monkeypatch: Plant) -> None:
    right = ShortConvolution.__call__

    def wrong(self: ShortConvolution, *given: Any) -> Any:
        return right(replace(self, weight=self.weight[:, ::-1]), *given)

    monkeypatch.setattr(ShortConvolution, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{DELTA}.q_conv.conv")


@needs_goldens
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param("decay_factors", lambda right: lambda *given: mx.ones_like(right(*given)), id="no-decay"),
        pytest.param("decay_factors", lambda right: lambda a, A, dt: right(a, A, 0 * dt), id="no-dt-bias"),
        pytest.param("unit_queries_and_keys", lambda _right: lambda q, k: (q, k), id="no-norm"),
        pytest.param(
            "gated_delta", lambda right: lambda *given, **named: right(*given, **{**named, "state": None}), id="state"
        ),
    ],
)
def test_another_rule_is_found_in_the_first_norm_after_it(
    monkeypatch: Plant, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(delta_attention, name, wrong(getattr(delta_attention, name)))
    assert found(TAPS) == ("DIFFERENT", f"{DELTA}.o_norm")


@needs_goldens
def test_another_eps_of_the_latent_norm_is_found_there(monkeypatch: Plant) -> None:
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        if not self.path.endswith("kv_a_layernorm"):
            return right(self, x)
        return tap(self.path, mx.fast.rms_norm(x, self.weight, 1e-5))

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{LATENT}.kv_a_layernorm")


@needs_goldens
def test_a_scale_of_the_own_part_alone_is_found_in_the_first_latent_layer(monkeypatch: Plant) -> None:
    monkeypatch.setattr(kimi_linear, "latent_scale", lambda _width, _scaling: 64**-0.5)
    assert found(TAPS) == ("DIFFERENT", f"{LATENT}.unembed_out")


@needs_goldens
@pytest.mark.parametrize(
    ("case", "change", "earliest"),
    [
        pytest.param(TAPS, {"factor": 2.4}, "model.layers.1.mlp", id="factor"),
        pytest.param(TAPS, {"normalised": False}, "model.layers.1.mlp", id="normalised"),
        # the last token chose the same experts in layer 1, an earlier one did not
        pytest.param(TIED, {"groups": 1, "kept": 1}, "model.layers.2.self_attn.q_conv.conv", id="groups"),
    ],
)
def test_another_choice_or_weight_is_found_in_the_experts(
    monkeypatch: Plant, case: str, change: dict[str, Any], earliest: str
) -> None:
    right = router.choose
    monkeypatch.setattr(router, "choose", lambda scores, bias, choice: right(scores, bias, replace(choice, **change)))
    assert found(case) == ("DIFFERENT", earliest)
