"""mistral3: the families it wraps, the names it reads, its plain caches, and planted faults that are seen where they begin."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.plain import PlainCache
from engine.errors import CheckpointError, ConfigError
from engine.families import llama, ministral3, mistral3
from engine.families.mistral3 import Config, Model
from engine.mask import Mask
from engine.model import open_model
from engine.taps import watching
from parity.models.fetch import ensure_snapshot
from parity.models.tiny import build_tiny, write_snapshot
from parity.models.tiny_catalogue import read
from parity.tensor import Tensor
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits, raw_config

TAPS = "mistral3-tiny/f32/fp/forced/p40-taps-tail-split"
MISTRAL = "mistral3_mistral-tiny/f32/fp/forced/p40-taps-tail-split"
ATTENTION = "language_model.model.layers.0.self_attn.o_proj"  # the first projection after attention
Plant = pytest.MonkeyPatch
Check = Callable[..., None]

both = pytest.mark.parametrize("name", ["mistral3", "mistral3_mistral"])


def raw(name: str) -> dict[str, Any]:
    return raw_config(f"{name}-tiny")


def drawn(name: str) -> dict[str, Tensor]:
    shapes = {tensor: tuple(shape) for tensor, shape in read(name, ".tensors")["tensors"].items()}
    return build_tiny(shapes, model_type="mistral3")


@both
def test_every_layer_keeps_every_position_whatever_its_window(name: str) -> None:
    model = open_model(ensure_snapshot(f"{name}-tiny").path, dtype="f32")
    assert isinstance(model, Model)
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)
    windows = {"mistral3": [None] * 4, "mistral3_mistral": [16, None] * 2}[name]
    assert [block.attention.window for block in model.blocks] == windows


@both
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_hubs_layout_gives_the_same_bits(same_bits: Check, name: str, dtype: str) -> None:
    converted, hub = (ensure_snapshot(f"{name}{form}-tiny").path for form in ("", "-hub"))
    same_bits(logits(converted, dtype=dtype), logits(hub, dtype=dtype))


@both
def test_a_text_models_own_names_give_the_same_bits(tmp_path: Path, same_bits: Check, name: str) -> None:
    plain = {tensor.removeprefix("language_model."): value for tensor, value in drawn(name).items()}
    write_snapshot(tmp_path, raw(name), plain)
    same_bits(logits(ensure_snapshot(f"{name}-tiny").path), logits(tmp_path))


@both
def test_modules_of_a_hubs_snapshot_go_by_the_converted_names(name: str) -> None:
    shown: dict[str, list[str]] = {}
    for form in ("", "-hub"):
        with watching(lambda path, _value, form=form: shown.setdefault(form, []).append(path)):  # type: ignore[misc]
            logits(ensure_snapshot(f"{name}{form}-tiny").path)
    assert shown[""] == shown["-hub"]
    assert {"language_model", "language_model.model", ATTENTION} < set(shown[""])


def test_two_layouts_at_once_are_refused(tmp_path: Path) -> None:
    held = drawn("mistral3")
    write_snapshot(tmp_path, raw("mistral3"), {**held, "model.norm.weight": held["language_model.model.norm.weight"]})
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path, dtype="f32")
    assert str(caught.value) == (
        "the checkpoint mixes two layouts\n"
        "  missing        nothing\n"
        "  there already  language_model.model.norm.weight\n"
        "  next           take a snapshot as the hub has it, or one that is converted throughout"
    )


def test_a_copy_of_the_embedding_is_dropped_where_the_head_is_tied(tmp_path: Path, same_bits: Check) -> None:
    held = drawn("mistral3")
    copy = {"language_model.lm_head.weight": held["language_model.model.embed_tokens.weight"]}
    write_snapshot(tmp_path, raw("mistral3"), held | copy)
    same_bits(logits(ensure_snapshot("mistral3-tiny").path), logits(tmp_path))


def test_a_tensor_that_belongs_to_nothing_is_refused(tmp_path: Path) -> None:
    held = drawn("mistral3")
    write_snapshot(tmp_path, raw("mistral3"), {**held, "model.extra.weight": held["language_model.model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"(?s)1 tensor .*\n  tensors  language_model\.model\.extra\.weight\n"):
        open_model(tmp_path, dtype="f32")


def test_the_text_config_says_which_family() -> None:
    assert isinstance(Config.read(raw("mistral3")), ministral3.Config)
    assert isinstance(Config.read(raw("mistral3_mistral")), llama.Config)


def test_a_head_is_untied_where_the_text_config_is_silent() -> None:
    silent, outer = raw("mistral3_mistral"), raw("mistral3_mistral") | {"tie_word_embeddings": True}
    assert not Config.read(silent).tie_word_embeddings
    assert not Config.read(outer).tie_word_embeddings
    tied = silent["text_config"] | {"tie_word_embeddings": True}
    assert Config.read(silent | {"text_config": tied}).tie_word_embeddings


@pytest.mark.parametrize("model_type", ["mistral4", None])
def test_a_text_model_of_another_family_is_refused(model_type: str | None) -> None:
    config = raw("mistral3")
    with pytest.raises(ConfigError) as caught:
        Config.read(config | {"text_config": config["text_config"] | {"model_type": model_type}})
    assert str(caught.value) == (
        f"mistral3 around a text model of model_type {model_type!r} is not supported\n"
        "  supported  ministral3, mistral, llama\n"
        "  next       use a snapshot of one of these"
    )


def test_an_unknown_key_of_the_text_config_is_refused() -> None:
    config = raw("mistral3")
    with pytest.raises(ConfigError, match=r"^config key 'experts' is unknown to model_type 'ministral3'\n"):
        Config.read(config | {"text_config": config["text_config"] | {"experts": 2}})


def test_keys_of_published_configs_are_known() -> None:
    published: Mapping[str, Any] = {
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral"},
        "vision_feature_layer": -1,
    }
    assert Config.read(raw("mistral3") | published) == Config.read(raw("mistral3"))


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, MISTRAL])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
def test_a_window_that_is_off_by_one_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = PlainCache.mask

    def wrong(self: PlainCache, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        return right(self, L, window=window and window + 1, as_array=as_array)

    monkeypatch.setattr(PlainCache, "mask", wrong)
    assert found(MISTRAL) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_rings_where_the_oracle_has_plain_caches_are_not_passed_over(monkeypatch: Plant) -> None:
    monkeypatch.setattr(Model, "make_caches", llama.Model.make_caches)
    assert found(MISTRAL)[0] != "IDENTICAL"


@needs_goldens
def test_queries_that_do_not_grow_are_found_in_the_first_attention(monkeypatch: Plant) -> None:
    monkeypatch.setattr(ministral3, "query_growth", lambda _config, x, _offset: mx.ones((x.shape[1], 1)))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_a_rope_base_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = mistral3.make_rope
    monkeypatch.setattr(mistral3, "make_rope", lambda width, *, base, **more: right(width, base=base * 1.001, **more))
    assert found(MISTRAL) == ("DIFFERENT", ATTENTION)
