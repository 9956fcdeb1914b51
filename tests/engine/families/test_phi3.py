"""phi3: what it refuses, how its fused projections are cut, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import pytest

from engine import mlp, rope
from engine.errors import ConfigError
from engine.families import phi3
from engine.families.phi3 import FIXED, Config
from engine.model import open_model
from engine.norm import RMSNorm
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import raw_config

TAPS = "phi3-tiny/f32/fp/forced/p40-taps-tail-split"
FIRST = "model.layers.0.self_attn.o_proj"  # the first projection after attention

Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def raw() -> Mapping[str, Any]:
    return raw_config("phi3-tiny")


def test_every_layer_remembers_all_positions() -> None:
    model = open_model(ensure_snapshot("phi3-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["plain"] * 4
    assert (model.vocabulary, model.head_width, model.no_packed_kv) == (512, 64, None)


def test_the_original_context_beside_rope_scaling_counts(raw: Mapping[str, Any]) -> None:
    assert Config.read(raw).rope().gain == 3**0.5  # 4096 positions from 16: sqrt(1 + 8 / 4)
    assert Config.read({**raw, "max_position_embeddings": 16}).rope().gain == 1.0


def test_su_is_the_first_name_of_longrope(raw: Mapping[str, Any], same_bits: Callable[..., None]) -> None:
    su = Config.read({**raw, "rope_scaling": {**raw["rope_scaling"], "type": "su"}}).rope()
    assert su.gain == Config.read(raw).rope().gain
    same_bits(Config.read(raw).rope().periods, su.periods)


def test_without_scaling_the_rotation_is_plain(raw: Mapping[str, Any]) -> None:
    plain = Config.read({**raw, "rope_scaling": None, "rope_traditional": True}).rope()
    assert (plain.width, plain.base, plain.periods, plain.traditional) == (48, 10000.0, None, True)


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 2.0}, {"rope_type": "longrope"}])
def test_another_form_of_scaling_is_refused(raw: Mapping[str, Any], scaling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "rope_scaling": scaling})
    assert str(caught.value) == (
        "phi3 stretches positions by longrope only\n"
        f"  type   {scaling.get('type')}\n"
        "  known  longrope, or su, its first name\n"
        "  next   use a snapshot whose rope_scaling is one of these"
    )


@pytest.mark.parametrize("key", FIXED)
def test_a_value_that_is_not_computed_is_refused(raw: Mapping[str, Any], key: str) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: "another"})
    assert str(caught.value) == (
        f"phi3 computes {key} {json.dumps(FIXED[key])} only\n"
        '  found  "another"\n'
        "  next   use a snapshot whose config.json says so"
    )


@pytest.mark.parametrize(
    ("changes", "width", "heads", "kv", "rotated"),
    [
        ({"num_key_value_heads": 3}, 256, 4, 3, 48),
        ({"num_attention_heads": 0}, 256, 0, 2, 192),
        ({"hidden_size": 258}, 258, 4, 2, 48),
        ({"partial_rotary_factor": 0.8}, 256, 4, 2, 51),
        ({"partial_rotary_factor": 2}, 256, 4, 2, 128),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    *, raw: Mapping[str, Any], changes: dict[str, Any], width: int, heads: int, kv: int, rotated: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, **changes})
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  hidden size          {width}\n"
        f"  num attention heads  {heads}\n"
        f"  num key value heads  {kv}\n"
        f"  head dim             {width // max(heads, 1)}\n"
        f"  rotated              {rotated}\n"
        "  next                 mend config.json"
    )


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_a_base_that_is_off_by_a_thousandth_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = phi3.make_rope
    monkeypatch.setattr(phi3, "make_rope", lambda w, **given: right(w, **{**given, "base": given["base"] * 1.001}))
    assert found(TAPS) == ("DIFFERENT", FIRST)


@needs_goldens
def test_the_short_factors_instead_of_the_long_ones_are_found(monkeypatch: Plant) -> None:
    right = rope.longrope_periods

    def wrong(width: int, *, base: float, scaling: Mapping[str, Any]) -> mx.array:
        return right(width, base=base, scaling={**scaling, "long_factor": scaling["short_factor"]})

    monkeypatch.setattr(rope, "longrope_periods", wrong)
    assert found(TAPS) == ("DIFFERENT", FIRST)


@needs_goldens
@pytest.mark.parametrize("factor", [0.999, 1 / 3**0.5])
def test_another_gain_is_found(monkeypatch: Plant, factor: float) -> None:
    right = rope.longrope_gain
    monkeypatch.setattr(rope, "longrope_gain", lambda scaling, **given: right(scaling, **given) * factor)
    assert found(TAPS) == ("DIFFERENT", FIRST)


@needs_goldens
def test_keys_and_values_exchanged_are_found(monkeypatch: Plant) -> None:
    right = mx.split

    def wrong(array: mx.array, parts: Any, axis: int = 0) -> Any:
        pieces = right(array, parts, axis)
        return [pieces[0], *reversed(pieces[1:])] if len(pieces) == 3 else pieces

    monkeypatch.setattr(phi3.mx, "split", wrong)
    assert found(TAPS) == ("DIFFERENT", FIRST)


@needs_goldens
def test_gate_and_up_exchanged_are_found_where_they_meet(monkeypatch: Plant) -> None:
    right = mlp.FusedGatedMLP.take

    def wrong(*args: Any, **given: Any) -> Any:
        return right(*args, **given, activation=lambda gate, up: mlp.swiglu(up, gate))

    monkeypatch.setattr(phi3.FusedGatedMLP, "take", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.mlp.down_proj")


@needs_goldens
def test_an_epsilon_that_is_doubled_is_found_in_its_norm(monkeypatch: Plant) -> None:
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        if not self.path.endswith("2.post_attention_layernorm"):
            return right(self, x)
        return tap(self.path, mx.fast.rms_norm(x, self.weight, self.eps * 2))

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", "model.layers.2.post_attention_layernorm")
