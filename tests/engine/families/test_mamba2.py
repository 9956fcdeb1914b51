"""mamba2: what it refuses, that both layouts are one model, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine import state_space, state_space_mixer
from engine.cache.convert import KVMode
from engine.errors import ConfigError, RequestError
from engine.families import mamba2
from engine.families.mamba2 import FIXED, Config
from engine.generate import steps
from engine.model import open_model
from engine.short_convolution import ShortConvolution
from engine.state_space_mixer import OutputNorm
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits_of, raw_config

TAPS = "mamba2-tiny/f32/fp/forced/p40-taps-tail-split"
LONG = "mamba2-tiny/f32/fp/forced/p258-whole"
MIXER = "backbone.layers.0.mixer"

Plant = pytest.MonkeyPatch


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("mamba2-tiny")


def test_filters_as_on_the_hub_are_the_converted_ones(same_bits: Callable[..., None]) -> None:
    same_bits(logits_of("mamba2-tiny"), logits_of("mamba2-hub-tiny"))


def test_every_layer_remembers_a_window_and_matrices() -> None:
    model = open_model(ensure_snapshot("mamba2-tiny").path, dtype="bf16")
    caches = model.make_caches()
    assert [cache.kind for cache in caches] == ["arrays-2"] * 4
    _, (first, *_) = model.hidden(mx.array([[1, 2, 3, 4, 5]]), caches)
    assert [(array.shape, array.dtype) for array in first.arrays] == [
        ((1, 3, 256 + 2 * 2 * 64), mx.bfloat16),
        ((1, 8, 32, 64), mx.float32),
    ]
    assert (model.vocabulary, model.head_width) == (512, 32)


def test_there_is_nothing_to_pack() -> None:
    model = open_model(ensure_snapshot("mamba2-tiny").path, dtype="f32")
    with pytest.raises(RequestError) as caught:
        steps(model, [1, 2], num_steps=1, kv=KVMode(bits=8, group_size=32))
    assert str(caught.value) == (
        "the model's keys and values cannot be packed\n"
        "  reason  mamba2 has no keys and values; the oracle ignores the option silently\n"
        "  next    use the KV mode fp"
    )


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("rms_norm", False)])
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"mamba2 computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


def test_groups_and_bounds_that_do_not_fit_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^the heads of the scan do not fit together\n"):
        Config.read({**raw, "n_groups": 3})
    with pytest.raises(ConfigError, match=r"^time_step_limit is not a lower and an upper bound\n"):
        Config.read({**raw, "time_step_limit": [0.1]})


def test_the_older_name_of_the_states_width_goes_second(raw: dict[str, Any]) -> None:
    assert Config.read({**raw, "ssm_state_size": 16}).heads.state_width == 16
    assert Config.read(raw).heads.state_width == raw["state_size"]


# planted faults


@needs_goldens
def test_without_a_fault_the_engine_is_the_oracle() -> None:
    assert found(TAPS) == ("IDENTICAL", None)


@needs_goldens
def test_blocks_that_take_their_epsilon_from_the_config_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr(mamba2, "BLOCK_EPS", 1e-6)
    assert found(TAPS) == ("DIFFERENT", "backbone.layers.0.norm")


@needs_goldens
def test_a_convolution_that_forgets_is_found_there(monkeypatch: Plant) -> None:
    right = ShortConvolution.__call__
    monkeypatch.setattr(ShortConvolution, "__call__", lambda self, x, _state, _ends=None: right(self, x, None))
    assert found(TAPS) == ("DIFFERENT", f"{MIXER}.conv1d")


@needs_goldens
def test_a_window_that_is_one_position_late_is_found_there(monkeypatch: Plant) -> None:
    right = ShortConvolution.__call__

    def late(self: ShortConvolution, x: mx.array, state: mx.array | None, *_: object) -> tuple[mx.array, mx.array]:
        y, kept = right(self, x, state)
        return y, mx.roll(kept, 1, axis=1)

    monkeypatch.setattr(ShortConvolution, "__call__", late)
    assert found(TAPS) == ("DIFFERENT", f"{MIXER}.conv1d")


def forgets(x: mx.array, write: mx.array, read: mx.array, steps: mx.array, **rest: Any) -> Any:
    return state_space.scan(x, write, read, steps, **{**rest, "state_BHEN": None})


def does_not_bypass(x: mx.array, write: mx.array, read: mx.array, steps: mx.array, **rest: Any) -> Any:
    return state_space.scan(x, write, read, steps, **{**rest, "D_H": 0 * rest["D_H"]})


def swaps_write_and_read(x: mx.array, write: mx.array, read: mx.array, steps: mx.array, **rest: Any) -> Any:
    return state_space.scan(x, read, write, steps, **rest)


def keeps_matrices_in_16_bits(x: mx.array, write: mx.array, read: mx.array, steps: mx.array, **rest: Any) -> Any:
    y, matrices = state_space.scan(x, write, read, steps, **rest)
    return y, matrices.astype(mx.bfloat16).astype(mx.float32)


@needs_goldens
@pytest.mark.parametrize("wrong", [forgets, does_not_bypass, swaps_write_and_read, keeps_matrices_in_16_bits])
def test_a_wrong_scan_is_found_in_the_norm_that_follows(monkeypatch: Plant, wrong: Callable[..., Any]) -> None:
    monkeypatch.setattr(state_space_mixer, "scan", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{MIXER}.norm")


@needs_goldens
@pytest.mark.parametrize("limits", [(0.0, 100.0), (0.1, 100.0), (0.0, 0.6)])
def test_time_steps_out_of_bounds_are_found(monkeypatch: Plant, limits: tuple[float, float]) -> None:
    monkeypatch.setattr(mamba2, "read_limits", lambda _bounds: limits)
    assert found(TAPS) == ("DIFFERENT", f"{MIXER}.norm")


@needs_goldens
@pytest.mark.parametrize("change", [{"eps": 1e-5}, {"gate_first": False}, {"group": 128}], ids=lambda c: next(iter(c)))
def test_a_wrong_gated_norm_is_found_there(monkeypatch: Plant, change: dict[str, Any]) -> None:
    right = OutputNorm.__call__
    monkeypatch.setattr(OutputNorm, "__call__", lambda self, y, gate: right(replace(self, **change), y, gate))
    assert found(TAPS) == ("DIFFERENT", f"{MIXER}.norm")


@needs_goldens
@pytest.mark.parametrize("piece", [255, 257])
def test_pieces_of_another_length_are_found(monkeypatch: Plant, piece: int) -> None:
    monkeypatch.setattr(state_space, "PIECE", piece)
    assert found(LONG) == ("DIFFERENT", None)


@needs_goldens
def test_pieces_of_the_oracles_length_are_the_oracles() -> None:
    assert found(LONG) == ("IDENTICAL", None)
