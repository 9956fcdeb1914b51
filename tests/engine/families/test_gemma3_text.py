"""gemma3_text: what it refuses, that a tied head is read, and that planted faults are seen where they begin."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode
from engine.cache.rotating import RotatingCache
from engine.errors import CheckpointError, ConfigError
from engine.families import gemma3_text
from engine.families.gemma3_text import Attention, Config, residual_sum
from engine.generate import steps
from engine.model import open_model
from engine.norm import RMSNorm
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits, logits_of, raw_config

TAPS = "gemma3_text-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "gemma3_text-hub-tiny/f32/fp/forced/p40-tail-split"
SLIDING = "model.layers.0.self_attn.o_proj"  # the first projection after attention; layers 0, 1 and 3 have windows
FULL = "model.layers.2.self_attn.o_proj"
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("gemma3_text-tiny")


@pytest.fixture
def hub_copy(tmp_path: Path) -> Path:
    """A copy of the hub's layout that a test may change."""
    for file in ensure_snapshot("gemma3_text-hub-tiny").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_without_a_head_the_embedding_is_the_head(
    hub_copy: Path, edit_weights: Callable[..., None], same_bits: Callable[..., None]
) -> None:
    tied = logits(hub_copy)
    mx.eval(tied)  # before its weights are overwritten
    embedding = mx.load(str(hub_copy / "model.safetensors"))["model.embed_tokens.weight"]  # type: ignore[index]
    edit_weights(hub_copy, {"lm_head.weight": embedding})
    same_bits(tied, logits(hub_copy))


def test_a_head_of_its_own_is_used(other_bits: Callable[..., None]) -> None:
    other_bits(logits_of("gemma3_text-tiny"), logits_of("gemma3_text-hub-tiny"))


def test_a_config_that_demands_a_head_of_its_own_gets_one_or_is_refused(
    hub_copy: Path, edit_json: Callable[..., None]
) -> None:
    edit_json(hub_copy / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no tensor lm_head\.weight"):
        open_model(hub_copy, dtype="f32")


def test_layers_remember_a_window_or_all_and_can_be_packed() -> None:
    model = open_model(ensure_snapshot("gemma3_text-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0"] * 2 + ["plain", "rotating-w16-k0"]
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)
    (step,) = steps(model, [1, 2], num_steps=1, kv=KVMode(bits=8))
    ring = "rotating-quantized-w16-k0-b8-g64"
    assert [cache.kind for cache in step.caches] == [ring, ring, "quantized-b8-g64", ring]


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("attention_bias", True, "False"),
        ("attn_logit_softcapping", 50.0, "None"),
        ("final_logit_softcapping", 30.0, "None"),
        ("hidden_activation", "gelu", "gelu_pytorch_tanh"),
        ("use_bidirectional_attention", True, "False"),
    ],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"gemma3_text computes one {key} only\n  found  {value}\n  known  {known}\n  next   mend config.json"
    )


def test_other_words_for_the_pattern_must_agree_with_it(raw: dict[str, Any]) -> None:
    same = Config.read({**raw, "layer_types": KINDS, "_sliding_window_pattern": 3})
    assert replace(same, layer_types=None) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "layer_types": KINDS[::-1]})
    assert str(caught.value) == (
        "the layers of config.json contradict sliding_window_pattern, which alone the oracle reads\n"
        "  sliding window pattern   3\n"
        "   sliding window pattern  None\n"
        "  layer types              sliding_attention, full_attention, sliding_attention, sliding_attention\n"
        "  next                     mend config.json"
    )
    with pytest.raises(ConfigError, match="contradict sliding_window_pattern"):
        Config.read({**raw, "_sliding_window_pattern": 6})


@pytest.mark.parametrize("key", ["sliding_window", "sliding_window_pattern"])
def test_a_window_of_nothing_is_refused(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="gemma3_text needs a window and a pattern of at least 1"):
        Config.read({**raw, key: 0})


def test_heads_that_do_not_fit_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "num_key_value_heads": 3})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        "  num attention heads  4\n"
        "  num key value heads  3\n"
        "  next                 mend config.json"
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_a_residual_beyond_float16_stays_finite(sign: int) -> None:
    x = mx.array([60000.0 * sign, 1.0], mx.float16)
    assert residual_sum(x, x).tolist() == [65504.0 * sign, 2.0]
    assert residual_sum(x.astype(mx.float32), x.astype(mx.float32)).tolist() == [120000.0 * sign, 2.0]


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, HUB])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
def test_a_window_off_by_one_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = RotatingCache.mask
    monkeypatch.setattr(RotatingCache, "mask", lambda self, L, *, window: right(self, L, window=window - 1))
    assert found(TAPS) == ("DIFFERENT", SLIDING)


@needs_goldens
@pytest.mark.parametrize(
    ("change", "earliest"),
    [
        pytest.param(lambda c: replace(c, rope_local_base_freq=c.rope_local_base_freq * 1.001), SLIDING, id="local"),
        pytest.param(lambda c: replace(c, rope_theta=c.rope_theta * 1.001), FULL, id="global"),
        pytest.param(lambda c: replace(c, rope_scaling=None), FULL, id="no-scaling"),
        pytest.param(lambda c: replace(c, query_pre_attn_scalar=64.0), SLIDING, id="scale"),
    ],
)
def test_another_rotation_or_scale_is_found_in_the_first_attention_that_has_it(
    monkeypatch: Plant, change: Callable[[Config], Config], earliest: str
) -> None:
    right = Attention.take
    monkeypatch.setattr(
        Attention, "take", lambda checkpoint, path, config, window: right(checkpoint, path, change(config), window)
    )
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_windowed_layers_that_rotate_as_the_full_ones_are_found(monkeypatch: Plant) -> None:
    right = gemma3_text.make_rope
    monkeypatch.setattr(gemma3_text, "make_rope", lambda width, **_: right(width, base=1e6))
    assert found(TAPS) == ("DIFFERENT", SLIDING)


@needs_goldens
def test_an_embedding_scaled_by_the_exact_root_is_found_in_the_first_norm(monkeypatch: Plant) -> None:
    right = gemma3_text.Embedding.__call__
    off = 128**0.5 / 11.3125  # the oracle rounds the root to bfloat16
    monkeypatch.setattr(gemma3_text.Embedding, "__call__", lambda self, ids: right(self, ids) * off)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.input_layernorm")


@needs_goldens
@pytest.mark.parametrize(
    "leaf", ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_feedforward_layernorm"]
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


@needs_goldens
def test_the_embedding_in_place_of_the_head_is_found_in_the_logits(monkeypatch: Plant) -> None:
    right = gemma3_text.Model.logits
    monkeypatch.setattr(gemma3_text.Model, "logits", lambda self, hidden: right(replace(self, head=None), hidden))
    status, earliest = found("gemma3_text-tiny/f32/fp/forced/p40-tail-split")
    assert (status, earliest) == ("DIFFERENT", None)
