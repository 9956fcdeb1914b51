"""deepseek_v32: what it refuses, that tiles of 8-bit floats are read, and that planted faults are seen where they begin."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import block_float8, sparse_indexer
from engine.cache.convert import KVMode
from engine.errors import ConfigError, RequestError
from engine.families import deepseek_v32
from engine.families.deepseek_v32 import Attention, Config
from engine.generate import steps
from engine.model import open_model
from engine.norm import LayerNorm
from engine.sparse_indexer import Indexer
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, judged, needs_goldens
from tests.engine.families.tiny_snapshot import logits, logits_of, raw_config

TAPS = "deepseek_v32-tiny/f32/fp/forced/p40-taps-tail-split"
LOGITS = "deepseek_v32-tiny/f32/fp/forced/p40-tail-split"
HUB = "deepseek_v32-hub-tiny/f32/fp/forced/p40-tail-split"
AFTER_ATTENTION = "model.layers.0.self_attn.unembed_out"
INDEXER = "model.layers.0.self_attn.indexer"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("deepseek_v32-tiny")


def test_tiles_are_the_model_of_their_values(tmp_path: Path, same_bits: Callable[..., None]) -> None:
    hub = ensure_snapshot("deepseek_v32-hub-tiny").path
    tensors = mx.load(str(hub / "model.safetensors"))
    assert isinstance(tensors, dict)
    tiles = [name for name in tensors if name.endswith("_scale_inv")]
    assert len(tiles) > 100
    for name in tiles:
        factors, weight = tensors.pop(name), name.removesuffix("_scale_inv")
        values = mx.from_fp8(tensors[weight], dtype=mx.float32)
        spread = mx.concatenate(
            [mx.broadcast_to(row[None], (128, row.size)) for row in mx.repeat(factors, 128, axis=1)], axis=0
        )
        tensors[weight] = (values * spread[: values.shape[0], : values.shape[1]]).astype(mx.bfloat16)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_bytes((ensure_snapshot("deepseek_v32-tiny").path / "config.json").read_bytes())
    same_bits(logits(tmp_path), logits(hub))


def test_tiles_are_not_the_values_that_they_were_made_from(other_bits: Callable[..., None]) -> None:
    other_bits(logits_of("deepseek_v32-tiny"), logits_of("deepseek_v32-hub-tiny"))


def test_every_layer_remembers_latents_and_keys_of_the_indexer_and_they_cannot_be_packed() -> None:
    model = open_model(ensure_snapshot("deepseek_v32-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["list[plain,plain]"] * 4
    assert (model.vocabulary, model.head_width) == (512, 64)
    with pytest.raises(RequestError, match="latents are multiplied outside attention too"):
        steps(model, [1], num_steps=1, kv=KVMode(bits=8, group_size=32))


@pytest.mark.parametrize(
    ("key", "value"), [("index_topk", 0), ("index_head_dim", 30), ("index_n_heads", 0), ("q_lora_rank", 0)]
)
def test_sizes_that_do_not_fit_are_refused(raw: dict[str, Any], key: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value).startswith("the sizes of config.json do not fit together\n  index head dim ")
    assert f"  {key.replace('_', ' '):<19}  {value}\n" in str(caught.value)


def test_a_config_without_an_indexer_is_refused(raw: dict[str, Any]) -> None:
    del raw["index_topk"]
    with pytest.raises(ConfigError) as caught:
        Config.read(raw)
    assert str(caught.value) == (
        "config.json lacks what model_type 'deepseek_v32' needs\n"
        "  missing  index_topk\n"
        "  next     take the config.json that belongs to these weights"
    )


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, HUB])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    ("topk", "fact", "said"),
    [
        (15, "wrong", f"activations/0/{INDEXER}: expected U32[1, 1, 16], actual U32[1, 1, 15]"),
        (100, "missing", f"activations/0/{INDEXER}"),
    ],
)
def test_fewer_positions_or_all_are_found_in_the_first_indexer(
    monkeypatch: Plant, topk: int, fact: str, said: str
) -> None:
    right = Attention.take
    monkeypatch.setattr(
        Attention, "take", lambda checkpoint, path, config: right(checkpoint, path, replace(config, index_topk=topk))
    )
    verdict = judged(TAPS)
    assert verdict.status.value == "INCOMPARABLE"
    assert str(verdict.facts[fact]).splitlines()[0] == said


@needs_goldens
@pytest.mark.parametrize(
    ("change", "earliest"),
    [
        pytest.param(lambda c: replace(c, indexer_rope_interleave=True), INDEXER, id="pairs-of-the-indexer"),
        # the last position selects the same ones, and turns what it attends to otherwise
        pytest.param(lambda c: replace(c, rope_theta=10001.0), AFTER_ATTENTION, id="base"),
    ],
)
def test_another_rotation_is_found_where_it_first_counts(
    monkeypatch: Plant, change: Callable[[Config], Config], earliest: str
) -> None:
    right = Attention.take
    monkeypatch.setattr(Attention, "take", lambda checkpoint, path, config: right(checkpoint, path, change(config)))
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_scores_that_are_not_cut_at_zero_are_found_in_the_first_indexer(monkeypatch: Plant) -> None:
    monkeypatch.setattr(sparse_indexer.mx, "maximum", lambda scores, _: scores)
    assert found(TAPS) == ("DIFFERENT", INDEXER)


@needs_goldens
def test_the_worst_positions_in_place_of_the_best_are_found_in_the_first_indexer(monkeypatch: Plant) -> None:
    right = sparse_indexer.mx.argpartition

    def wrong(scores: mx.array, kth: int, axis: int) -> mx.array:
        return right(-scores if kth == -16 else scores, kth=kth, axis=axis)  # routers choose with it too

    monkeypatch.setattr(sparse_indexer.mx, "argpartition", wrong)
    assert found(TAPS) == ("DIFFERENT", INDEXER)


@needs_goldens
def test_the_published_eps_in_place_of_the_oracles_is_found_in_the_norm_of_the_keys(monkeypatch: Plant) -> None:
    right = LayerNorm.__call__

    def wrong(self: LayerNorm, x: mx.array) -> mx.array:
        return right(replace(self, eps=1e-6), x)

    monkeypatch.setattr(LayerNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.indexer.k_norm")


@needs_goldens
def test_keys_that_are_not_normalised_are_found_there(monkeypatch: Plant) -> None:
    monkeypatch.setattr(LayerNorm, "__call__", lambda self, x: tap(self.path, x))
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.indexer.k_norm")


@needs_goldens
def test_selected_positions_in_another_order_are_found(monkeypatch: Plant) -> None:
    right = Indexer.__call__

    def wrong(self: Indexer, *given: Any, **named: Any) -> Any:
        selected, cache = right(self, *given, **named)
        return None if selected is None else mx.sort(selected, axis=-1), cache

    monkeypatch.setattr(Indexer, "__call__", wrong)
    assert found(LOGITS)[0] == "DIFFERENT"


@needs_goldens
def test_a_selection_without_the_mask_is_found(monkeypatch: Plant) -> None:
    right = deepseek_v32.only_selected

    def wrong(*given: mx.array, allowed: mx.array | None) -> Any:
        del allowed
        return right(*given, allowed=None)

    monkeypatch.setattr(deepseek_v32, "only_selected", wrong)
    assert found(LOGITS)[0] == "DIFFERENT"


@needs_goldens
def test_factors_that_are_left_out_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr(
        block_float8, "_unpacked", lambda weight, _factors: [mx.from_fp8(weight, dtype=mx.bfloat16) * 0.002]
    )
    assert found(HUB)[0] == "DIFFERENT"
