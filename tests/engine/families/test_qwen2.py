"""qwen2: what it refuses, what its layers remember, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import grouped_attention
from engine.errors import CheckpointError, ConfigError
from engine.families import qwen2
from engine.families.qwen2 import Config
from engine.linear import Linear
from engine.model import open_model
from engine.norm import RMSNorm
from parity.models.fetch import ensure_snapshot
from parity.models.tiny import build_tiny, write_snapshot
from parity.models.tiny_catalogue import read
from parity.tensor import Tensor
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits, raw_config

TAPS = "qwen2-tiny/f32/fp/forced/p40-taps-tail-split"
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("qwen2-tiny")


@pytest.fixture(scope="module")
def tensors(raw: Mapping[str, Any]) -> Mapping[str, Tensor]:
    shapes = {name: tuple(shape) for name, shape in read("qwen2", ".tensors")["tensors"].items()}
    return build_tiny(shapes, model_type=raw["model_type"])


def test_every_layer_keeps_every_position() -> None:
    model = open_model(ensure_snapshot("qwen2-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)


def test_an_untied_head_is_read_and_a_tied_one_is_dropped(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], tmp_path: Path, same_bits: Callable[..., None]
) -> None:
    copied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    other = {**tensors, "lm_head.weight": tensors["model.layers.0.mlp.up_proj.weight"]}
    other["lm_head.weight"] = Tensor(dtype="BF16", shape=(512, 256), data=2 * other["lm_head.weight"].data)
    for name, tied, held in (("tied", True, other), ("untied", False, copied)):
        write_snapshot(tmp_path / name, {**raw, "tie_word_embeddings": tied}, held)
        same_bits(logits(ensure_snapshot("qwen2-tiny").path), logits(tmp_path / name))
    write_snapshot(tmp_path / "other", {**raw, "tie_word_embeddings": False}, other)
    with pytest.raises(AssertionError):
        same_bits(logits(tmp_path / "untied"), logits(tmp_path / "other"))


def test_frequencies_are_dropped_and_a_bias_too_many_is_not(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], tmp_path: Path, same_bits: Callable[..., None]
) -> None:
    bias = tensors["model.norm.weight"]
    write_snapshot(tmp_path / "a", raw, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": bias})
    same_bits(logits(ensure_snapshot("qwen2-tiny").path), logits(tmp_path / "a"))
    write_snapshot(tmp_path / "b", raw, {**tensors, "model.layers.0.self_attn.o_proj.bias": bias})
    with pytest.raises(
        CheckpointError, match=r"(?s)1 tensor .*\n  tensors  model\.layers\.0\.self_attn\.o_proj\.bias\n"
    ):
        logits(tmp_path / "b")


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [("hidden_act", "gelu", '"silu"'), ("use_sliding_window", True, "false"), ("use_mrope", True, "false")],
)
def test_what_it_does_not_compute_is_refused(raw: Mapping[str, Any], key: str, value: object, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"qwen2 computes {key} {known} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 3}, {"num_key_value_heads": 0}, {"hidden_size": 260}])
def test_heads_that_do_not_fit_are_refused(raw: Mapping[str, Any], changes: dict[str, int]) -> None:
    changed = {**raw, **changes}
    with pytest.raises(ConfigError) as caught:
        Config.read(changed)
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  hidden size          {changed['hidden_size']}\n"
        "  num attention heads  4\n"
        f"  num key value heads  {changed['num_key_value_heads']}\n"
        f"  head dim             {changed['hidden_size'] // 4}\n"
        f"  rotated              {changed['hidden_size'] // 4}\n"
        "  next                 mend config.json"
    )


def test_a_head_width_of_its_own_is_refused(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^config key 'head_dim' is unknown to model_type 'qwen2'\n"):
        Config.read({**raw, "head_dim": 128})


def test_keys_of_published_configs_are_known(raw: Mapping[str, Any]) -> None:
    published = {"hidden_act": "silu", "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}
    assert Config.read({**raw, **published, "use_mrope": False}) == Config.read(raw)


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_bias_left_out_is_found_at_its_projection(monkeypatch: Plant, name: str) -> None:
    right = Linear.__call__

    def wrong(self: Linear, x: mx.array) -> mx.array:
        return right(replace(self, bias=None) if self.path.endswith(name) else self, x)

    monkeypatch.setattr(Linear, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.self_attn.{name}")


@needs_goldens
def test_a_rope_base_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = qwen2.make_rope
    monkeypatch.setattr(qwen2, "make_rope", lambda width, *, base, **more: right(width, base=base * 1.001, **more))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.o_proj")


@needs_goldens
def test_a_scale_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = grouped_attention.attend
    monkeypatch.setattr(
        grouped_attention, "attend", lambda *heads, scale, mask: right(*heads, scale=scale * 1.001, mask=mask)
    )
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.o_proj")


@needs_goldens
def test_an_epsilon_that_is_off_is_found_in_the_first_norm(monkeypatch: Plant) -> None:
    right = RMSNorm.__call__
    monkeypatch.setattr(RMSNorm, "__call__", lambda self, x: right(replace(self, eps=self.eps * 2), x))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.input_layernorm")
