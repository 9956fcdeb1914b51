"""mistral: it is llama whole, its window bounds nothing, and planted faults are seen where they begin."""

from collections.abc import Mapping
from typing import Any

import pytest

from engine.cache.plain import PlainCache
from engine.errors import ConfigError
from engine.families import llama, mistral
from engine.families.mistral import Config
from engine.mask import Mask
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "mistral-tiny/f32/fp/forced/p40-taps-tail-split"
ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("mistral-tiny")


def test_its_window_bounds_nothing(raw: Mapping[str, Any]) -> None:
    model = open_model(ensure_snapshot("mistral-tiny").path, dtype="f32")
    assert raw["sliding_window"] == 16  # shorter than the prompt of every case, whose goldens see all of it
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4


def test_layers_that_are_named_sliding_have_the_window(raw: Mapping[str, Any]) -> None:
    config = Config.read({**raw, "layer_types": ["sliding_attention", "full_attention"] * 2})
    assert [config.window(layer) for layer in range(4)] == [16, None, 16, None]


def test_its_parts_are_those_of_llama() -> None:
    assert all(getattr(mistral, name) is getattr(llama, name) for name in mistral.__all__)


def test_an_unknown_key_is_refused_under_its_own_name(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^config key 'num_experts' is unknown to model_type 'mistral'\n"):
        Config.read({**raw, "num_experts": 8})


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_window_where_there_is_none_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = PlainCache.mask

    def wrong(self: PlainCache, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        return right(self, L, window=window or 16, as_array=as_array)

    monkeypatch.setattr(PlainCache, "mask", wrong)
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_a_rope_base_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = llama.make_rope
    monkeypatch.setattr(llama, "make_rope", lambda width, *, base, **more: right(width, base=base * 1.001, **more))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)
