"""minicpm: both ways of having no head of its own, what it refuses, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.errors import CheckpointError, ConfigError
from engine.families import minicpm
from engine.families.minicpm import Config
from engine.generate import last_row
from engine.model import CausalModel, open_model
from engine.norm import RMSNorm
from engine.taps import tap, watching
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "minicpm-tiny/f32/fp/forced/p40-taps-tail-split"
IDS = [3, 17, 99, 0, 127, 64]

Check = Callable[..., None]
Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("minicpm-tiny")


@pytest.fixture
def write(tmp_path: Path, raw: Mapping[str, Any]) -> Callable[..., Path]:
    """Write the tiny snapshot with another head tensor (None for none) and another config."""

    def write(name: str, *, head: mx.array | None, **changes: Any) -> Path:
        tensors = mx.load(str(ensure_snapshot("minicpm-tiny").path / "model.safetensors"))
        assert isinstance(tensors, dict)
        del tensors["lm_head.weight"]
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(
            str(folder / "model.safetensors"), tensors if head is None else {**tensors, "lm_head.weight": head}
        )
        (folder / "config.json").write_text(json.dumps({**raw, **changes}))
        return folder

    return write


def embedding() -> mx.array:
    tensors = mx.load(str(ensure_snapshot("minicpm-tiny").path / "model.safetensors"))
    assert isinstance(tensors, dict)
    return tensors["model.embed_tokens.weight"]


def row(model: CausalModel) -> mx.array:
    hidden, _ = model.hidden(mx.array([IDS]), model.make_caches())
    return last_row(model, hidden)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_without_a_head_the_embedding_is_the_head_tied_or_not(
    write: Callable[..., Path], same_bits: Check, dtype: Any
) -> None:
    copied = row(open_model(write("copied", head=embedding()), dtype=dtype))
    same_bits(copied, row(open_model(write("absent", head=None), dtype=dtype)))
    same_bits(copied, row(open_model(write("tied", head=None, tie_word_embeddings=True), dtype=dtype)))
    same_bits(copied, row(open_model(ensure_snapshot("minicpm-hub-tiny").path, dtype=dtype)))


def test_a_head_of_its_own_is_used(other_bits: Check) -> None:
    own, none = (open_model(ensure_snapshot(f"minicpm-{form}").path, dtype="f32") for form in ("tiny", "hub-tiny"))
    other_bits(row(own), row(none))


def test_a_packed_embedding_serves_as_the_head(tmp_path: Path, same_bits: Check) -> None:
    source = ensure_snapshot("minicpm-q8g64-tiny").path
    tensors = mx.load(str(source / "model.safetensors"))
    assert isinstance(tensors, dict)
    rest = {name: array for name, array in tensors.items() if not name.startswith("lm_head.")}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), rest)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    model = open_model(tmp_path, dtype="f32")
    hidden, _ = model.hidden(mx.array([IDS]), model.make_caches())
    parts = (tensors[f"model.embed_tokens.{leaf}"] for leaf in ("weight", "scales", "biases"))
    weight, scales, biases = (part.astype(mx.float32) if part.dtype != mx.uint32 else part for part in parts)
    expected = mx.quantized_matmul(hidden / (256 / 48), weight, scales, biases, group_size=64, bits=8)
    same_bits(expected[:, -1], last_row(model, hidden))


def test_a_tied_config_with_a_head_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"\n  tensors  lm_head\.weight\n"):
        open_model(write("both", head=embedding(), tie_word_embeddings=True), dtype="f32")


def test_the_head_that_is_the_embedding_is_watched_as_a_head() -> None:
    seen: list[str] = []
    with watching(lambda path, _: seen.append(path)):
        row(open_model(ensure_snapshot("minicpm-hub-tiny").path, dtype="f32"))
    assert seen[-1] == "lm_head"


def test_every_layer_remembers_all_positions() -> None:
    model = open_model(ensure_snapshot("minicpm-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


@pytest.mark.parametrize(
    ("key", "value", "known"), [("hidden_act", "gelu", '"silu"'), ("attention_bias", True, "false")]
)
def test_what_is_not_computed_is_refused(raw: Mapping[str, Any], key: str, value: object, known: str) -> None:
    assert Config.read({**raw, "hidden_act": "silu", "attention_bias": False}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"minicpm computes {key} {known} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize(
    ("changes", "width", "heads", "kv", "head_width"),
    [
        ({"num_key_value_heads": 3}, 256, 4, 3, 64),
        ({"num_attention_heads": 0}, 256, 0, 2, 256),
        ({"hidden_size": 258}, 258, 4, 2, 64),
        ({"hidden_size": 12}, 12, 4, 2, 3),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    *, raw: Mapping[str, Any], changes: dict[str, Any], width: int, heads: int, kv: int, head_width: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  hidden size          {width}\n"
        f"  num attention heads  {heads}\n"
        f"  num key value heads  {kv}\n"
        f"  head dim             {head_width}\n"
        f"  rotated              {head_width}\n"
        "  next                 mend config.json"
    )


def test_a_head_that_would_divide_by_infinity_is_refused(raw: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "dim_model_base": 0})
    assert str(caught.value) == (
        "the head of minicpm divides by hidden_size / dim_model_base\n"
        "  dim model base  0\n"
        "  next            mend config.json"
    )


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    ("changes", "earliest"),
    [
        pytest.param({"scale_emb": 12.01}, "model.layers.0.input_layernorm", id="embedding"),
        pytest.param({"scale_depth": 1.401}, "model.layers.0.post_attention_layernorm", id="branches"),
        pytest.param({"dim_model_base": 49}, "lm_head", id="head"),
        pytest.param({"rope_theta": 10010.0}, "model.layers.0.self_attn.o_proj", id="base"),
        pytest.param({"rms_norm_eps": 2e-6}, "model.layers.0.input_layernorm", id="epsilon"),
    ],
)
def test_a_constant_that_is_off_is_found_where_it_acts(
    monkeypatch: Plant, changes: dict[str, Any], earliest: str
) -> None:
    right = Config.read
    monkeypatch.setattr(Config, "read", lambda raw: right({**raw, **changes}))
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_a_reciprocal_instead_of_a_division_is_found_in_the_head(monkeypatch: Plant) -> None:
    def wrong(self: minicpm.Model, hidden_BLD: mx.array) -> mx.array:
        assert self.head is not None
        return self.head(hidden_BLD * (1 / self.config.head_divisor))

    monkeypatch.setattr(minicpm.Model, "logits", wrong)
    assert found(TAPS) == ("DIFFERENT", "lm_head")


@needs_goldens
def test_a_head_that_is_not_divided_is_found_there(monkeypatch: Plant) -> None:
    monkeypatch.setattr(Config, "head_divisor", 1.0)
    assert found(TAPS) == ("DIFFERENT", "lm_head")
    assert found("minicpm-hub-tiny/f32/fp/forced/p40-tail-split") == ("DIFFERENT", None)


@needs_goldens
def test_a_norm_offset_is_found_in_its_norm(monkeypatch: Plant) -> None:
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        if self.path != "model.norm" or self.weight is None:
            return right(self, x)
        return tap(self.path, mx.fast.rms_norm(x, 1 + self.weight, self.eps))

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.norm")
