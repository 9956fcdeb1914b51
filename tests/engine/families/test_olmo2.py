"""olmo2: what it refuses, and that planted faults are seen where they begin."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.errors import ConfigError
from engine.families import olmo2
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "olmo2-tiny/f32/fp/forced/p40-taps-tail-split"
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("olmo2-tiny")


def test_every_layer_keeps_every_position() -> None:
    model = open_model(ensure_snapshot("olmo2-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 3
    assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)


@pytest.mark.parametrize(("key", "only", "found_value"), [("hidden_act", '"silu"', "gelu")])
def test_what_it_does_not_compute_is_refused(raw: Mapping[str, Any], key: str, only: str, found_value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        olmo2.Config.read({**raw, key: found_value})
    assert str(caught.value).splitlines()[0] == f"olmo2 computes {key} {only} only"


def test_heads_that_do_not_fit_are_refused(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the heads of config\.json do not fit together"):
        olmo2.Config.read({**raw, "num_key_value_heads": 3})


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_rope_base_that_is_off_is_seen_in_the_first_attention(monkeypatch: Plant) -> None:
    make_rope = olmo2.make_rope

    def bent(width: int, *, base: float, **options: Any) -> object:
        return make_rope(width, base=base * 1.001, **options)

    monkeypatch.setattr(olmo2, "make_rope", bent)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.o_proj")


@needs_goldens
@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_a_norm_that_is_skipped_is_seen_in_the_attention(monkeypatch: Plant, norm: str) -> None:
    take = olmo2.Attention.take

    def without(*args: Any) -> olmo2.Attention:
        attention = take(*args)
        other = getattr(attention, norm)
        return replace(attention, **{norm: replace(other, weight=mx.ones_like(other.weight))})

    monkeypatch.setattr(olmo2.Attention, "take", without)
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.self_attn.{norm}")


@needs_goldens
def test_norms_per_head_are_seen_in_the_attention(monkeypatch: Plant) -> None:
    norm = olmo2.RMSNorm.__call__

    def per_head(self: olmo2.RMSNorm, x: mx.array) -> mx.array:
        if not self.path.endswith("q_norm") or self.weight is None:
            return norm(self, x)
        heads = x.reshape(*x.shape[:-1], -1, 64)
        return mx.fast.rms_norm(heads, None, self.eps).reshape(x.shape) * self.weight

    monkeypatch.setattr(olmo2.RMSNorm, "__call__", per_head)
    assert found(TAPS)[0] != "IDENTICAL"


@needs_goldens
def test_a_norm_before_the_attention_is_seen(monkeypatch: Plant) -> None:
    def before(block: olmo2.Block, x_BLD: mx.array, cache: Any) -> Any:
        attended, cache = block.attention(block.attention_norm(x_BLD), cache)
        h_BLD = x_BLD + attended
        return h_BLD + block.mlp(block.mlp_norm(h_BLD)), cache

    monkeypatch.setattr(olmo2.Block, "__call__", before)
    assert found(TAPS)[0] != "IDENTICAL"
