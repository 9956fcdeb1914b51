"""ministral3: queries that grow, scales beside weights, what it refuses, and planted faults that are seen where they begin."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.convert import KVMode
from engine.cache.rotating import RotatingCache
from engine.errors import CheckpointError, ConfigError
from engine.families import ministral3
from engine.families.ministral3 import Config, query_growth
from engine.generate import steps
from engine.mask import Mask
from engine.model import open_model
from parity.models.fetch import ensure_snapshot
from parity.models.hub_layouts import to_hub
from parity.models.tiny import build_tiny, write_snapshot
from parity.models.tiny_catalogue import read
from parity.tensor import Tensor
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits, raw_config

TAPS = "ministral3-tiny/f32/fp/forced/p40-taps-tail-split"
SLIDING = "ministral3_sliding-tiny/f32/fp/forced/p40-taps-tail-split"
ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention
Plant = pytest.MonkeyPatch
Check = Callable[..., None]
GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("ministral3-tiny")


@pytest.fixture(scope="module")
def hub(raw: Mapping[str, Any]) -> Mapping[str, Tensor]:
    shapes = {name: tuple(shape) for name, shape in read("ministral3", ".tensors")["tensors"].items()}
    return to_hub(raw, build_tiny(shapes, model_type="ministral3"))


def test_caches_are_as_the_layers_say() -> None:
    for name, kinds in (("ministral3", ["plain"] * 4), ("ministral3_sliding", ["rotating-w24-k0", "plain"] * 2)):
        model = open_model(ensure_snapshot(f"{name}-tiny").path, dtype="f32")
        assert [cache.kind for cache in model.make_caches()] == kinds
        assert (model.head_width, model.vocabulary, model.no_packed_kv) == (64, 512, None)


def test_keys_and_values_of_a_ring_are_packed_too() -> None:
    model = open_model(ensure_snapshot("ministral3_sliding-tiny").path, dtype="f32")
    (step,) = steps(model, [1, 2], num_steps=1, kv=KVMode(bits=8, group_size=64))
    assert [cache.kind for cache in step.caches] == ["rotating-quantized-w24-k0-b8-g64", "quantized-b8-g64"] * 2


def test_queries_grow_from_the_context_on(raw: Mapping[str, Any]) -> None:
    growth = np.array(query_growth(Config.read(raw), mx.zeros((1, 40, 2)), 10))[:, 0]
    positions = np.arange(10, 50)
    assert np.unique(growth[:6]).tolist() == [1.0]  # below position 16 nothing grows
    right = 1 + 0.1 * np.log1p(positions // 16)
    assert np.abs(growth - right).max() < 1e-7
    assert query_growth(Config.read(raw), mx.zeros((1, 2, 2), dtype=mx.bfloat16), 0).dtype == mx.bfloat16


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_hubs_layout_gives_the_same_bits(same_bits: Check, dtype: str) -> None:
    converted, hub = (ensure_snapshot(name).path for name in ("ministral3-tiny", "ministral3-hub-tiny"))
    same_bits(logits(converted, dtype=dtype), logits(hub, dtype=dtype))


def test_a_scale_counts(raw: Mapping[str, Any], hub: Mapping[str, Tensor], tmp_path: Path, other_bits: Check) -> None:
    scale = hub[f"{GATE}.weight_scale_inv"]
    doubled = Tensor.of((scale.bits() + np.uint16(1 << 7)).astype("<u2"), "BF16")
    write_snapshot(tmp_path, raw, {**hub, f"{GATE}.weight_scale_inv": doubled})
    other_bits(logits(ensure_snapshot("ministral3-tiny").path), logits(tmp_path))


def test_codes_of_8_bits_are_refused_rather_than_read_as_integers(
    raw: Mapping[str, Any], hub: Mapping[str, Tensor], tmp_path: Path
) -> None:
    codes = Tensor.of(np.zeros((256, 128), dtype=np.uint8))
    write_snapshot(tmp_path, raw, {**hub, f"{GATE}.weight": codes})
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path, dtype="f32")
    assert str(caught.value) == (
        f"tensor {GATE}.weight is stored as 8-bit floats, which mlx hands out as integers\n"
        "  found  mlx.core.uint8\n"
        "  next   use a snapshot that was dequantised to bfloat16"
    )


def test_a_scale_without_a_weight_is_refused(raw: Mapping[str, Any], hub: Mapping[str, Tensor], tmp_path: Path) -> None:
    write_snapshot(tmp_path, raw, {name: tensor for name, tensor in hub.items() if name != f"{GATE}.weight"})
    with pytest.raises(CheckpointError, match=rf"^the checkpoint mixes two layouts\n  missing        {GATE}\.weight\n"):
        open_model(tmp_path, dtype="f32")


def test_another_activation_is_refused(raw: Mapping[str, Any]) -> None:
    assert Config.read({**raw, "hidden_act": "silu"}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "hidden_act": "gelu"})
    assert str(caught.value) == (
        'ministral3 computes hidden_act "silu" only\n'
        '  found  "gelu"\n'
        "  next   use a snapshot whose config.json says so"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("beta", "context"), [(None, 16), (0.1, None), (0.1, 0), (0.1, "16")], ids=["no-beta", "no-context", "zero", "text"]
)
def test_numbers_that_attention_needs_must_be_there(raw: Mapping[str, Any], beta: object, context: object) -> None:
    given = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": context}
    kept = {key: value for key, value in {**raw["rope_parameters"], **given}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "rope_parameters": kept})
    assert str(caught.value) == (
        "rope_parameters lack a positive number that ministral3 needs\n"
        "  rope theta                        1000000.0\n"
        f"  llama 4 scaling beta              {beta}\n"
        f"  original max position embeddings  {context}\n"
        "  next                              mend config.json"
    )


@pytest.mark.parametrize(
    ("kinds", "window", "shown"),
    [
        (["full_attention"] * 3, 24, "3 of kind full_attention"),
        (["chunked_attention"] * 4, 24, "4 of kind chunked_attention"),
        (["sliding_attention", "full_attention"] * 2, None, "4 of kind full_attention, sliding_attention"),
    ],
)
def test_other_layers_are_refused(raw: Mapping[str, Any], kinds: list[str], window: int | None, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "layer_types": kinds, "sliding_window": window})
    assert str(caught.value) == (
        "ministral3 has no such layers\n"
        f"  layer types        {shown}\n"
        "  num hidden layers  4\n"
        f"  sliding window     {window}\n"
        "  known              full_attention, or sliding_attention with a sliding_window of at least 1\n"
        "  next               mend config.json"
    )


@pytest.mark.parametrize(("kv", "width"), [(3, 64), (0, 64), (2, 63)])
def test_heads_that_do_not_fit_are_refused(raw: Mapping[str, Any], kv: int, width: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "num_key_value_heads": kv, "head_dim": width})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        "  num attention heads  4\n"
        f"  num key value heads  {kv}\n"
        f"  head dim             {width}\n"
        f"  rotated              {width}\n"
        "  next                 mend config.json"
    )


def test_an_unscaled_rotation_may_still_have_a_context(raw: Mapping[str, Any]) -> None:
    scaling = {"rope_type": "default", "rope_theta": 5e5, "llama_4_scaling_beta": 0.1}
    scaling["original_max_position_embeddings"] = 16
    rope = Config.read({**raw, "rope_parameters": scaling}).rope()
    assert (rope.base, rope.periods, rope.gain) == (5e5, None, 1.0)


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, SLIDING])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
def test_growth_a_position_too_early_is_found_where_it_first_reaches_the_last_token(monkeypatch: Plant) -> None:
    right = ministral3.query_growth
    monkeypatch.setattr(ministral3, "query_growth", lambda config, x, offset: right(config, x, offset + 1))
    # the queries at 15 and 31 alone are wrong: what is recorded at 39 sees them through the second layer's keys
    assert found(TAPS) == ("DIFFERENT", "model.layers.1.self_attn.o_proj")


@needs_goldens
def test_queries_that_do_not_grow_are_found_in_the_first_attention(monkeypatch: Plant) -> None:
    monkeypatch.setattr(ministral3, "query_growth", lambda _config, x, _offset: mx.ones((x.shape[1], 1)))
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_growth_that_is_rounded_elsewhere_is_seen(monkeypatch: Plant) -> None:
    right = ministral3.query_growth

    def unrounded(config: Config, x_BLD: mx.array, offset: int) -> mx.array:
        return right(config, x_BLD.astype(mx.float32), offset)

    case = "ministral3-mxfp4-tiny/f32/fp/forced/p40-tail-split"  # its embedded tokens are bfloat16
    assert found(case) == ("IDENTICAL", None)
    monkeypatch.setattr(ministral3, "query_growth", unrounded)
    assert found(case) == ("DIFFERENT", None)


@needs_goldens
def test_a_yarn_factor_that_is_off_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = ministral3.make_rope

    def wrong(width: int, *, base: float, scaling: dict[str, Any]) -> Any:
        return right(width, base=base, scaling=scaling | {"factor": scaling["factor"] + 0.01})

    monkeypatch.setattr(ministral3, "make_rope", wrong)
    assert found(TAPS) == ("DIFFERENT", ATTENTION)


@needs_goldens
def test_a_window_that_is_off_by_one_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = RotatingCache.mask

    def wrong(self: RotatingCache, L: int, *, window: int | None = None, as_array: bool = False) -> Mask:
        return right(self, L, window=window and window - 1, as_array=as_array)

    monkeypatch.setattr(RotatingCache, "mask", wrong)
    assert found(SLIDING) == ("DIFFERENT", ATTENTION)
