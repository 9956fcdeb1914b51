"""gemma: what it refuses, and that planted faults are seen where they begin."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.activation import geglu_approx
from engine.config import load_json
from engine.errors import ConfigError
from engine.families import gemma
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens

TAPS = "gemma-tiny/f32/fp/forced/p40-taps-tail-split"
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return load_json(ensure_snapshot("gemma-tiny").path / "config.json")


def test_every_layer_keeps_every_position() -> None:
    model = open_model(ensure_snapshot("gemma-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 3
    assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)


@pytest.mark.parametrize(
    ("key", "only", "found_value"),
    [
        ("attention_bias", "false", True),
        ("rope_scaling", "null", {"factor": 2}),
        ("tie_word_embeddings", "true", False),
    ],
)
def test_what_it_does_not_compute_is_refused(raw: Mapping[str, Any], key: str, only: str, found_value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        gemma.Config.read({**raw, key: found_value})
    assert str(caught.value).splitlines()[0] == f"gemma computes {key} {only} only"


def test_heads_that_do_not_fit_are_refused(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the heads of config\.json do not fit together"):
        gemma.Config.read({**raw, "num_key_value_heads": 3})


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_rope_base_that_is_off_is_seen_in_the_first_attention(monkeypatch: Plant) -> None:
    make_rope = gemma.make_rope

    def bent(width: int, *, base: float, **options: Any) -> object:
        return make_rope(width, base=base * 1.001, **options)

    monkeypatch.setattr(gemma, "make_rope", bent)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.o_proj")


@needs_goldens
def test_a_norm_without_its_one_is_seen_in_the_first_norm(monkeypatch: Plant) -> None:
    take = gemma.RMSNorm.take
    monkeypatch.setattr(gemma.RMSNorm, "take", lambda *args, **options: take(*args, **{**options, "plus_one": False}))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.input_layernorm")


@needs_goldens
def test_the_approximate_gelu_is_seen_in_the_first_mlp(monkeypatch: Plant) -> None:
    monkeypatch.setattr(gemma, "geglu", geglu_approx)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.mlp.down_proj")


@needs_goldens
def test_an_embedding_that_is_not_scaled_is_seen_after_the_first_layer(monkeypatch: Plant) -> None:
    read = gemma.Embedding.__call__
    monkeypatch.setattr(gemma.Embedding, "__call__", lambda table, ids: read(table, ids) * 0.999)
    assert found(TAPS)[0] == "DIFFERENT"


@needs_goldens
def test_an_eps_that_is_off_is_seen_in_the_first_norm(monkeypatch: Plant) -> None:
    read = gemma.Config.read
    monkeypatch.setattr(gemma.Config, "read", lambda given: replace(read(given), rms_norm_eps=1e-3))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.input_layernorm")
