"""olmo3: what it refuses, what its layers remember, and that planted faults are seen where they begin."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode
from engine.cache.rotating import RotatingCache
from engine.errors import ConfigError
from engine.families import olmo3
from engine.families.olmo3 import Config
from engine.generate import steps
from engine.model import CausalModel, open_model
from engine.norm import RMSNorm
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "olmo3-tiny/f32/fp/forced/p40-taps-tail-split"
FULL = "model.layers.3.self_attn.o_proj"  # the first projection after attention in the one layer that sees all
FIRST = "model.layers.0.self_attn.o_proj"

Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("olmo3-tiny")


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return open_model(ensure_snapshot("olmo3-tiny").path, dtype="f32")


def test_every_fourth_layer_remembers_all_and_the_others_a_window(model: CausalModel) -> None:
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0"] * 3 + ["plain"]


def test_layer_types_decide_where_they_are_given(raw: Mapping[str, Any]) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Config.read({**raw, "layer_types": kinds})
    assert [config.window(layer) for layer in range(4)] == [None, 16, None, 16]


def test_only_layers_that_see_all_positions_are_scaled(raw: Mapping[str, Any]) -> None:
    config = Config.read(raw)
    assert (config.rope(window=16).periods, config.rope(window=16).gain) == (None, 1.0)
    assert config.rope(window=None).periods is not None
    assert config.rope(window=None).gain > 1.2


def test_keys_and_values_of_a_ring_are_packed_too(model: CausalModel) -> None:
    (step,) = steps(model, [1, 2], num_steps=1, kv=KVMode(bits=8, group_size=64))
    assert [cache.kind for cache in step.caches] == ["rotating-quantized-w16-k0-b8-g64"] * 3 + ["quantized-b8-g64"]


def test_another_activation_is_refused(raw: Mapping[str, Any]) -> None:
    assert Config.read({**raw, "hidden_act": "silu"}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "hidden_act": "gelu"})
    assert str(caught.value) == (
        'olmo3 computes hidden_act "silu" only\n'
        '  found  "gelu"\n'
        "  next   use a snapshot whose config.json says so"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kinds", "window"),
    [
        ({"layer_types": ["full_attention"] * 3}, "3 of kind full_attention", 16),
        ({"layer_types": ["chunked_attention"] * 4}, "4 of kind chunked_attention", 16),
        ({"sliding_window": 0}, "4 of kind full_attention, sliding_attention", 0),
    ],
)
def test_other_layers_are_refused(raw: Mapping[str, Any], changes: dict[str, Any], kinds: str, window: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "olmo3 has no such layers\n"
        f"  layer types        {kinds}\n"
        "  num hidden layers  4\n"
        f"  sliding window     {window}\n"
        "  known              full_attention, or sliding_attention with a sliding_window of at least 1\n"
        "  next               mend config.json"
    )


@pytest.mark.parametrize(
    ("changes", "heads", "kv", "width"),
    [({"num_key_value_heads": 3}, 4, 3, 64), ({"head_dim": 33}, 4, 2, 33), ({"num_attention_heads": 0}, 0, 2, 64)],
)
def test_heads_that_do_not_fit_are_refused(
    *, raw: Mapping[str, Any], changes: dict[str, Any], heads: int, kv: int, width: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  num attention heads  {heads}\n"
        f"  num key value heads  {kv}\n"
        f"  head dim             {width}\n"
        f"  rotated              {width}\n"
        "  next                 mend config.json"
    )


def test_heads_default_to_no_groups_and_to_the_width_over_their_number(raw: Mapping[str, Any]) -> None:
    config = Config.read({k: v for k, v in raw.items() if k not in ("head_dim", "num_key_value_heads")})
    assert (config.head_width, config.kv_heads) == (32, 4)


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_window_that_is_off_by_one_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = RotatingCache.mask

    def wrong(self: RotatingCache, L: int, *, window: int | None = None, as_array: bool = False) -> Any:
        return right(self, L, window=window and window - 1, as_array=as_array)

    monkeypatch.setattr(RotatingCache, "mask", wrong)
    assert found(TAPS) == ("DIFFERENT", FIRST)


@needs_goldens
def test_a_layer_that_remembers_less_than_the_oracle_s_cannot_be_compared(monkeypatch: Plant) -> None:
    right = olmo3.Attention.take

    def wrong(*args: Any) -> Any:
        return right(*args[:-1], args[-1] or 39)

    monkeypatch.setattr(olmo3.Attention, "take", wrong)
    assert found(TAPS) == ("INCOMPARABLE", None)


@needs_goldens
@pytest.mark.parametrize(
    ("changed", "earliest"),
    [
        pytest.param(lambda given: {**given, "base": given["base"] * 1.001}, FIRST, id="base"),
        pytest.param(lambda given: {**given, "scaling": None}, FULL, id="no-yarn"),
        pytest.param(
            lambda given: {**given, "scaling": given["scaling"] and {**given["scaling"], "mscale_all_dim": 1}},
            None,  # the attention factor that the snapshot states contradicts it: refused, not computed
            id="no-gain",
        ),
    ],
)
def test_another_rotation_is_found_in_the_layers_that_it_turns(
    monkeypatch: Plant, changed: Callable[[dict[str, Any]], dict[str, Any]], earliest: str | None
) -> None:
    right = olmo3.make_rope
    monkeypatch.setattr(olmo3, "make_rope", lambda width, **given: right(width, **changed(given)))
    assert found(TAPS) == ("DIFFERENT" if earliest else "ERROR", earliest)


def changed_norm(change: Callable[[RMSNorm, mx.array], mx.array], leaf: str) -> Callable[[RMSNorm, mx.array], mx.array]:
    right = RMSNorm.__call__
    return lambda self, x: tap(self.path, change(self, x)) if self.path.endswith(leaf) else right(self, x)


def per_head(norm: RMSNorm, x: mx.array) -> mx.array:
    heads = x.reshape(*x.shape[:-1], -1, 64)
    return mx.fast.rms_norm(heads, None, norm.eps).reshape(x.shape) * norm.weight


@needs_goldens
@pytest.mark.parametrize("leaf", ["q_norm", "k_norm"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, x: x, id="skipped"),
        pytest.param(per_head, id="per-head"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, norm.eps * 2), id="eps"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight + 1, norm.eps), id="offset"),
    ],
)
def test_a_wrong_norm_of_queries_or_keys_is_found_there(monkeypatch: Plant, change: Any, leaf: str) -> None:
    monkeypatch.setattr(RMSNorm, "__call__", changed_norm(change, leaf))
    assert found(TAPS) == ("DIFFERENT", f"model.layers.0.self_attn.{leaf}")


@needs_goldens
def test_norms_before_the_branches_rather_than_after_them_are_found(monkeypatch: Plant) -> None:
    def wrong(self: olmo3.Block, x_BLD: mx.array, cache: Any) -> Any:
        attended, cache = self.attention(self.attention_norm(x_BLD), cache)
        h_BLD = x_BLD + attended
        return tap(self.path, h_BLD + self.mlp(self.mlp_norm(h_BLD))), cache

    monkeypatch.setattr(olmo3.Block, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.self_attn.q_proj")
