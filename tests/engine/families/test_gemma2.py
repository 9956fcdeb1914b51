"""gemma2: what it refuses, what it remembers, and that planted faults are seen where they begin."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode
from engine.errors import ConfigError, RequestError
from engine.families import gemma2
from engine.families.gemma2 import Attention, Config
from engine.generate import steps
from engine.model import open_model
from engine.norm import RMSNorm
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "gemma2-tiny/f32/fp/forced/p40-taps-tail-split"
ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention
FIRST_NORM = "model.layers.0.input_layernorm"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("gemma2-tiny")


def test_every_layer_remembers_all_and_cannot_be_packed() -> None:
    model = open_model(ensure_snapshot("gemma2-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.vocabulary, model.head_width) == (512, 64)
    with pytest.raises(RequestError) as caught:
        steps(model, [1], num_steps=1, kv=KVMode(bits=8))
    assert str(caught.value) == (
        "the model's keys and values cannot be packed\n"
        "  reason  gemma2 caps its scores, for which the oracle multiplies plain keys\n"
        "  next    use the KV mode fp"
    )


@pytest.mark.parametrize("key", ["hidden_act", "hidden_activation"])
def test_another_activation_is_refused(raw: dict[str, Any], key: str) -> None:
    assert Config.read({**raw, key: "gelu_pytorch_tanh"}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: "gelu"})
    assert str(caught.value) == (
        f"gemma2 computes gelu_pytorch_tanh only\n  {key.replace('_', ' ')}  gelu\n"
        f"  {'next':<{len(key)}}  mend config.json"
    )


@pytest.mark.parametrize(("bias", "tied"), [(True, True), (False, False)])
def test_biases_and_a_head_of_its_own_are_refused(raw: dict[str, Any], bias: bool, tied: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "attention_bias": bias, "tie_word_embeddings": tied})
    assert str(caught.value) == (
        "gemma2 has no biases in attention and no head of its own\n"
        f"  attention bias       {bias}\n"
        f"  tie word embeddings  {tied}\n"
        "  next                 mend config.json"
    )


def test_heads_that_do_not_fit_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "num_key_value_heads": 3})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        "  num attention heads  4\n"
        "  num key value heads  3\n"
        "  next                 mend config.json"
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_key_head_for_a_group_is_that_head_for_every_member(
    normal: Callable[..., mx.array], same_bits: Callable[..., None], dtype: mx.Dtype
) -> None:
    attention = open_model(ensure_snapshot("gemma2-tiny").path, dtype="f32").blocks[0].attention  # type: ignore[attr-defined]
    q, k, v = (normal(seed, (1, heads, 5, 64), dtype) for seed, heads in enumerate((4, 2, 2)))
    grouped = attention._attend(q, k, v, "causal")
    same_bits(grouped, attention._attend(q, mx.repeat(k, 2, axis=1), mx.repeat(v, 2, axis=1), "causal"))


# planted faults


def with_config(**changes: Any) -> Callable[..., Attention]:
    """`Attention.take` of a config with other values than config.json has."""
    right = Attention.take

    def take(checkpoint: Any, path: str, config: Config, rope: Any) -> Attention:
        return right(checkpoint, path, replace(config, **changes), rope)

    return take


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize("changes", [{"attn_logit_softcapping": 49.0}, {"query_pre_attn_scalar": 64.0}])
def test_another_cap_or_scale_of_the_scores_is_found_in_the_first_attention(
    monkeypatch: Plant, changes: dict[str, float]
) -> None:
    monkeypatch.setattr(Attention, "take", with_config(**changes))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_a_rope_base_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = gemma2.make_rope
    monkeypatch.setattr(gemma2, "make_rope", lambda width, *, base, **more: right(width, base=base * 1.001, **more))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_scores_without_a_mask_are_found_where_earlier_positions_are_read(monkeypatch: Plant) -> None:
    right = Attention._attend
    monkeypatch.setattr(Attention, "_attend", lambda self, q, k, v, _mask: right(self, q, k, v, None))
    # the recorded position is the last one, which sees all in any case: the first layer's own output is right
    assert found(TAPS) == ("DIFFERENT", "model.layers.1.self_attn.o_proj")


@needs_goldens
def test_an_embedding_that_is_not_scaled_is_found_in_the_first_norm(monkeypatch: Plant) -> None:
    right = gemma2.Embedding.__call__
    monkeypatch.setattr(gemma2.Embedding, "__call__", lambda self, ids: right(self, ids) * (1 + 2**-20))
    assert found(TAPS) == ("DIFFERENT", FIRST_NORM)


@needs_goldens
def test_another_cap_of_the_logits_is_found_in_them_alone(monkeypatch: Plant) -> None:
    right = gemma2.soft_capped
    monkeypatch.setattr(gemma2, "soft_capped", lambda x, cap: right(x, 29.0 if cap == 30.0 else cap))
    assert found(TAPS) == ("DIFFERENT", None)


@needs_goldens
def test_the_other_gelu_is_found_in_the_first_mlp(monkeypatch: Plant) -> None:
    def erf_form(gate: mx.array, up: mx.array) -> mx.array:
        return gate * (1 + mx.erf(gate / 2**0.5)) / 2 * up

    monkeypatch.setattr(gemma2, "geglu_approx", erf_form)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.mlp.down_proj")


@needs_goldens
@pytest.mark.parametrize(
    "leaf",
    ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"],
)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _norm, x: x, id="skipped"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, norm.eps * 2), id="eps"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight - 1, norm.eps), id="no-offset"),
    ],
)
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, leaf: str, change: Callable[..., mx.array]) -> None:
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        return tap(self.path, change(self, x)) if self.path.endswith(leaf) else right(self, x)

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.{leaf}")
