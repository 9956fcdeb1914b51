"""qwen3_next: what it refuses, what its layers remember, both layouts, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine import gated_attention, gated_delta, norm, shared_expert_moe, short_convolution
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.families import qwen3_next
from engine.families.qwen3_next import Config, Model
from engine.model import CausalModel, open_model
from engine.quantization import Quantization
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import IDS, logits_in_pieces, raw_config

TAPS = "qwen3_next-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "qwen3_next-hub-tiny/f32/fp/forced/p40-tail-split"
LINEAR = "model.layers.0.linear_attn"
FULL = "model.layers.3.self_attn"
MLP = "model.layers.0.mlp"

Plant = pytest.MonkeyPatch
Check = Callable[..., None]
Raw = dict[str, Any]


@pytest.fixture(scope="module")
def raw() -> Raw:
    return raw_config("qwen3_next-tiny")


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return open_model(ensure_snapshot("qwen3_next-tiny").path, dtype="f32")


def opened(name: str) -> Checkpoint:
    return Checkpoint.open(ensure_snapshot(name).path, dtype=mx.float32, quantization=Quantization())


def test_every_fourth_layer_remembers_all_positions_and_the_others_a_state(model: CausalModel) -> None:
    assert [cache.kind for cache in model.make_caches()] == ["arrays-2"] * 3 + ["plain"]


def test_the_state_has_the_convolutions_window_and_float32_matrices(model: CausalModel) -> None:
    _, (first, *_, last) = model.hidden(mx.array([IDS]), model.make_caches())
    assert [(array.shape, array.dtype) for array in first.arrays] == [
        ((1, 3, 2 * 2 * 48 + 4 * 64), mx.float32),
        ((1, 4, 64, 48), mx.float32),
    ]
    assert (first.offset, last.offset) == (len(IDS), len(IDS))


@pytest.mark.parametrize("cuts", [(1,), (3, 5), tuple(range(1, len(IDS)))])
def test_pieces_give_the_whole(model: CausalModel, same_bits: Check, cuts: tuple[int, ...]) -> None:
    same_bits(logits_in_pieces(model), logits_in_pieces(model, cuts=cuts))


def test_a_hub_snapshot_is_the_converted_one(model: CausalModel, same_bits: Check) -> None:
    same_bits(
        logits_in_pieces(model), logits_in_pieces(open_model(ensure_snapshot("qwen3_next-hub-tiny").path, dtype="f32"))
    )


def test_layers_that_are_named_or_out_of_step_have_no_experts(raw: Raw) -> None:
    def sparse(**changes: Any) -> list[bool]:
        config = Config.read(raw | changes)
        return [config.has_experts(layer) for layer in range(4)]

    assert sparse() == [True, False, True, True]
    assert sparse(decoder_sparse_step=2) == [False, False, False, True]
    assert sparse(num_experts=0) == [False] * 4


def test_the_weights_of_the_chosen_are_normalised_where_the_config_says_so(raw: Raw) -> None:
    assert Config.read(raw).expert_sizes.normalised
    assert not Config.read(
        {key: value for key, value in raw.items() if key != "norm_topk_prob"}
    ).expert_sizes.normalised


def test_a_tied_head_needs_none_of_its_own(raw: Raw, same_bits: Check) -> None:
    tied = Model.build(raw | {"tie_word_embeddings": True}, opened("qwen3_next-tiny"))
    assert tied.head is None
    hidden, _ = tied.hidden(mx.array([IDS]), tied.make_caches())
    same_bits(tied.embedding.as_head(hidden), tied.logits(hidden))


# what is refused


@pytest.mark.parametrize(
    ("key", "value", "expected"), [("hidden_act", "gelu", '"silu"'), ("use_sliding_window", True, "false")]
)
def test_what_the_family_does_not_compute_is_refused(raw: Raw, key: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read(raw | {key: value})
    assert str(caught.value) == (
        f"qwen3_next computes {key} {expected} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


def test_layers_that_contradict_the_interval_are_refused(raw: Raw) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert Config.read(raw | {"layer_types": kinds}).layer_types == tuple(kinds)
    with pytest.raises(ConfigError) as caught:
        Config.read(raw | {"layer_types": kinds[::-1]})
    assert str(caught.value) == (
        "layer_types and full_attention_interval contradict each other\n"
        "  layer types              full_attention, linear_attention, linear_attention, linear_attention\n"
        "  full attention interval  4\n"
        "  which means              linear_attention, linear_attention, linear_attention, full_attention\n"
        "  next                     mend config.json"
    )


@pytest.mark.parametrize("key", ["full_attention_interval", "decoder_sparse_step"])
def test_steps_of_no_layers_are_refused(raw: Raw, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read(raw | {key: 0})
    assert (
        str(caught.value)
        == f"{key} counts layers\n  {key.replace('_', ' ')}  0\n  next{' ' * (len(key) - 2)}mend config.json"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_num_value_heads": 3},
        {"linear_num_key_heads": 0},
        {"linear_key_head_dim": 0},
        {"linear_conv_kernel_dim": 1},
    ],
)
def test_linear_heads_that_do_not_fit_are_refused(raw: Raw, changes: dict[str, int]) -> None:
    sizes = raw | changes
    with pytest.raises(ConfigError) as caught:
        Config.read(sizes)
    assert str(caught.value) == (
        "the heads of the linear layers do not fit together\n"
        f"  linear num key heads    {sizes['linear_num_key_heads']}\n"
        f"  linear num value heads  {sizes['linear_num_value_heads']}\n"
        f"  linear key head dim     {sizes['linear_key_head_dim']}\n"
        f"  linear value head dim   {sizes['linear_value_head_dim']}\n"
        f"  linear conv kernel dim  {sizes['linear_conv_kernel_dim']}\n"
        "  next                    mend config.json"
    )


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 3}, {"partial_rotary_factor": 1.5}])
def test_heads_of_attention_that_do_not_fit_are_refused(raw: Raw, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^the heads of config\.json do not fit together\n"):
        Config.read(raw | changes)


def test_more_chosen_experts_than_there_are_are_refused(raw: Raw) -> None:
    with pytest.raises(ConfigError, match=r"^the experts of config\.json do not fit together\n"):
        Config.read(raw | {"num_experts_per_tok": 9})


def test_one_missing_expert_of_the_hub_is_named(raw: Raw) -> None:
    checkpoint = opened("qwen3_next-hub-tiny")
    checkpoint.take(f"{MLP}.experts.5.gate_proj.weight", (64, 128))
    with pytest.raises(
        CheckpointError, match=r"^tensor model\.layers\.0\.mlp\.experts\.5\.gate_proj\.weight is used twice\n"
    ):
        Model.build(raw, checkpoint)


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


def shifted(
    self: short_convolution.ShortConvolution, x_BLC: mx.array, state: mx.array | None, _ends: Any = None
) -> Any:
    y, kept = RIGHT_CONVOLUTION(self, x_BLC, state)
    return y, mx.roll(kept, 1, axis=1)


def forgetful(
    self: short_convolution.ShortConvolution, x_BLC: mx.array, state: mx.array | None, _ends: Any = None
) -> Any:
    return RIGHT_CONVOLUTION(self, x_BLC, None if state is None else mx.zeros_like(state))


def looking_ahead(
    self: short_convolution.ShortConvolution, x_BLC: mx.array, state: mx.array | None, _ends: Any = None
) -> Any:
    return RIGHT_CONVOLUTION(replace(self, weight=self.weight[:, ::-1]), x_BLC, state)


def unit_eps_not_scaled(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    scale = q.shape[-1] ** -0.5
    return scale**2 * mx.fast.rms_norm(q, None, 1e-6), scale * mx.fast.rms_norm(k, None, 1e-6)


def keys_not_scaled(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    q, k = RIGHT_UNITS(q, k)
    return q, k * 7**0.5


def decayed_after(q: mx.array, k: mx.array, v: mx.array, *, decay: mx.array, **rest: Any) -> Any:
    return RIGHT_DELTA(q, k, v, decay=mx.concatenate([mx.ones_like(decay[:, :1]), decay[:, :-1]], axis=1), **rest)


def matrices_forgotten(q: mx.array, k: mx.array, v: mx.array, *, state: mx.array | None, **rest: Any) -> Any:
    return RIGHT_DELTA(q, k, v, state=None if state is None else mx.zeros_like(state), **rest)


def heads_in_turn(q: mx.array, k: mx.array, v: mx.array, **rest: Any) -> Any:
    q, k = (mx.tile(heads, (1, 1, v.shape[2] // heads.shape[2], 1)) for heads in (q, k))
    return RIGHT_DELTA(q, k, v, **rest)


RIGHT_CONVOLUTION = short_convolution.ShortConvolution.__call__
RIGHT_UNITS = gated_delta.unit_queries_and_keys
RIGHT_DELTA = gated_delta.gated_delta
RIGHT_DECAY = gated_delta.decay_factors
RIGHT_NORM = norm.RMSNorm.__call__
RIGHT_GATED_NORM = norm.GatedRMSNorm.__call__


@needs_goldens
@pytest.mark.parametrize(("fault", "leaf"), [(shifted, "conv1d"), (forgetful, "conv1d"), (looking_ahead, "conv1d")])
def test_a_wrong_window_of_the_convolution_is_found_in_it(monkeypatch: Plant, fault: Any, leaf: str) -> None:
    monkeypatch.setattr(short_convolution.ShortConvolution, "__call__", fault)
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.{leaf}")


@needs_goldens
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("unit_queries_and_keys", unit_eps_not_scaled),
        ("unit_queries_and_keys", keys_not_scaled),
        ("gated_delta", decayed_after),
        ("gated_delta", matrices_forgotten),
        ("gated_delta", heads_in_turn),
        ("decay_factors", lambda a, A_log, dt_bias: RIGHT_DECAY(a, A_log + 1e-6, dt_bias)),
        ("decay_factors", lambda a, A_log, dt_bias: RIGHT_DECAY(a, A_log, 0 * dt_bias)),
    ],
)
def test_a_wrong_delta_rule_is_found_in_its_norm(monkeypatch: Plant, name: str, fault: Any) -> None:
    monkeypatch.setattr(gated_delta, name, fault)
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.norm")


@needs_goldens
@pytest.mark.parametrize(
    "fault",
    [
        lambda self, x, _: tap(self.path, mx.fast.rms_norm(x, self.weight, self.eps)),
        lambda self, x, gate: RIGHT_GATED_NORM(replace(self, eps=self.eps * 10), x, gate),
        lambda self, x, gate: tap(self.path, mx.fast.rms_norm(x * gate * mx.sigmoid(gate), self.weight, self.eps)),
    ],
    ids=["not-gated", "eps", "gated-before"],
)
def test_a_wrong_gated_norm_is_found_there(monkeypatch: Plant, fault: Any) -> None:
    monkeypatch.setattr(norm.GatedRMSNorm, "__call__", fault)
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.norm")


@needs_goldens
@pytest.mark.parametrize("leaf", ["q_norm", "k_norm"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda self, x: tap(self.path, x), id="skipped"),
        pytest.param(lambda self, x: RIGHT_NORM(replace(self, eps=self.eps * 10), x), id="eps"),
        pytest.param(lambda self, x: RIGHT_NORM(replace(self, weight=self.weight + 1), x), id="offset"),
    ],
)
def test_a_wrong_norm_of_queries_or_keys_is_found_there(monkeypatch: Plant, change: Any, leaf: str) -> None:
    monkeypatch.setattr(
        norm.RMSNorm, "__call__", lambda self, x: (change if self.path.endswith(leaf) else RIGHT_NORM)(self, x)
    )
    assert found(TAPS) == ("DIFFERENT", f"{FULL}.{leaf}")


@needs_goldens
@pytest.mark.parametrize(
    "changes",
    [{"base": 999_000.0}, {"width": 64}, {"traditional": True}, {"scaling": None}],
    ids=["base", "whole-head", "neighbours", "no-yarn"],
)
def test_another_rotation_is_found_in_the_layer_of_attention(monkeypatch: Plant, changes: dict[str, Any]) -> None:
    right = qwen3_next.make_rope
    monkeypatch.setattr(qwen3_next, "make_rope", lambda width, **given: right(**{"width": width, **given, **changes}))
    assert found(TAPS) == ("DIFFERENT", f"{FULL}.o_proj")


@needs_goldens
@pytest.mark.parametrize(
    "fault",
    [mx.ones_like, lambda gate: gate * mx.sigmoid(gate)],
    ids=["skipped", "silu"],
)
def test_a_wrong_gate_of_attention_is_found_in_the_projection_after_it(monkeypatch: Plant, fault: Any) -> None:
    class Faulty:
        array, split = mx.array, mx.split
        sigmoid = staticmethod(fault)

    monkeypatch.setattr(gated_attention, "mx", Faulty)
    assert found(TAPS) == ("DIFFERENT", f"{FULL}.o_proj")


def with_sizes(**changes: Any) -> Callable[..., Any]:
    right = shared_expert_moe.SharedExpertMoE.__call__
    return lambda self, x: right(replace(self, sizes=replace(self.sizes, **changes)), x)


RIGHT_MOE = shared_expert_moe.SharedExpertMoE.__call__


@needs_goldens
@pytest.mark.parametrize(
    ("fault", "path"),
    [
        pytest.param(with_sizes(normalised=False), MLP, id="not-normalised"),
        pytest.param(with_sizes(chosen=3), None, id="one-more-chosen"),
    ],
)
def test_a_wrong_router_is_found_in_the_first_layer(monkeypatch: Plant, fault: Any, path: str | None) -> None:
    monkeypatch.setattr(shared_expert_moe.SharedExpertMoE, "__call__", fault)
    assert found(TAPS) == ("DIFFERENT" if path else "INCOMPARABLE", path)


@needs_goldens
def test_a_router_scale_that_is_off_is_found_in_the_layer(monkeypatch: Plant) -> None:
    right = shared_expert_moe.weighted_sum
    monkeypatch.setattr(shared_expert_moe, "weighted_sum", lambda outputs, weights: right(outputs, weights * 1.01))
    assert found(TAPS) == ("DIFFERENT", MLP)


@needs_goldens
def test_a_shared_expert_that_is_always_open_is_found_in_its_gate(monkeypatch: Plant) -> None:
    def wrong(self: shared_expert_moe.SharedExpertMoE, x: mx.array) -> mx.array:
        return RIGHT_MOE(replace(self, shared_gate=replace(self.shared_gate, bias=mx.array([1e3]))), x)

    monkeypatch.setattr(shared_expert_moe.SharedExpertMoE, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{MLP}.shared_expert_gate")


@needs_goldens
def test_projections_not_grouped_by_key_head_are_found_in_the_convolution(monkeypatch: Plant) -> None:
    def ungrouped(self: qwen3_next.LinearAttention, x: mx.array, cache: Any) -> Any:
        heads = self.mixer.heads
        B, L, _ = x.shape
        qkv, z = mx.split(self.qkvz(x), [heads.channels], axis=-1)
        b, a = mx.split(self.ba(x), 2, axis=-1)
        return self.mixer(qkv, z.reshape(B, L, heads.value_heads, -1), b, a, cache)

    monkeypatch.setattr(qwen3_next.LinearAttention, "__call__", ungrouped)
    assert found(TAPS) == ("DIFFERENT", f"{LINEAR}.conv1d")


@needs_goldens
@pytest.mark.parametrize("where", ["skipped", "after the cast"])
def test_a_hubs_norm_without_its_one_or_with_one_added_too_late_is_seen(monkeypatch: Plant, where: str) -> None:
    right = norm.RMSNorm.take

    def wrong(checkpoint: Checkpoint, path: str, **given: Any) -> norm.RMSNorm:
        given.pop("stored_less_one", None)
        taken = right(checkpoint, path, **given)
        return replace(taken, weight=taken.weight + 1) if where == "after the cast" else taken

    monkeypatch.setattr(norm.RMSNorm, "take", wrong)
    assert found(HUB)[0] == "DIFFERENT"


def test_every_key_of_the_config_has_a_reader(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^config key 'linear_window' is unknown to model_type 'qwen3_next'\n"):
        Config.read({**raw, "linear_window": 4})
