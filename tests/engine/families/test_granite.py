"""granite: what it refuses, and that planted faults are seen where they begin."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.errors import ConfigError
from engine.families import granite
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "granite-tiny/f32/fp/forced/p40-taps-tail-split"
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("granite-tiny")


def test_every_layer_keeps_every_position() -> None:
    model = open_model(ensure_snapshot("granite-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 3
    assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)


@pytest.mark.parametrize(("key", "only", "found_value"), [("hidden_act", '"silu"', "gelu")])
def test_what_it_does_not_compute_is_refused(raw: Mapping[str, Any], key: str, only: str, found_value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        granite.Config.read({**raw, key: found_value})
    assert str(caught.value).splitlines()[0] == f"granite computes {key} {only} only"


def test_heads_that_do_not_fit_are_refused(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the heads of config\.json do not fit together"):
        granite.Config.read({**raw, "num_key_value_heads": 3})


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_rope_base_that_is_off_is_seen_in_the_first_attention(monkeypatch: Plant) -> None:
    make_rope = granite.make_rope

    def bent(width: int, *, base: float, **options: Any) -> object:
        return make_rope(width, base=base * 1.001, **options)

    monkeypatch.setattr(granite, "make_rope", bent)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.o_proj")


@needs_goldens
@pytest.mark.parametrize(
    ("key", "earliest"),
    [
        ("embedding_multiplier", "model.layers.0.input_layernorm"),
        ("attention_multiplier", "model.layers.0.self_attn.o_proj"),
        ("residual_multiplier", "model.layers.0.post_attention_layernorm"),
        ("logits_scaling", None),
    ],
)
def test_a_scale_factor_that_is_off_is_seen_where_it_scales(
    monkeypatch: Plant, raw: Mapping[str, Any], key: str, earliest: str | None
) -> None:
    read = granite.Config.read
    monkeypatch.setattr(granite.Config, "read", lambda given: replace(read(given), **{key: raw[key] * 1.001}))
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_a_branch_that_is_scaled_after_the_sum_is_seen(monkeypatch: Plant) -> None:
    def scaled_late(block: granite.Block, x_BLD: mx.array, cache: Any) -> Any:
        attended, cache = block.attention(block.input_norm(x_BLD), cache)
        h_BLD = (x_BLD / block.multiplier + attended) * block.multiplier
        return h_BLD + block.mlp(block.post_norm(h_BLD)) * block.multiplier, cache

    monkeypatch.setattr(granite.Block, "__call__", scaled_late)
    assert found(TAPS)[0] != "IDENTICAL"


@needs_goldens
def test_multiplying_by_the_reciprocal_of_the_logits_scale_is_seen(monkeypatch: Plant) -> None:
    def reciprocal(model: granite.Model, hidden_BLD: mx.array) -> mx.array:
        return model.embedding.as_head(hidden_BLD) * (1 / model.config.logits_scaling)

    monkeypatch.setattr(granite.Model, "logits", reciprocal)
    assert found(TAPS) == ("DIFFERENT", None)
