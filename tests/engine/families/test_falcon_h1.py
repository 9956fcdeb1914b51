"""falcon_h1: what it refuses, what becomes of a hub snapshot, and that planted faults are seen where they begin."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import grouped_attention
from engine.cache.convert import KVMode
from engine.errors import ConfigError, RequestError
from engine.families import falcon_h1
from engine.families.falcon_h1 import FIXED, Block, Config, Model
from engine.generate import steps
from engine.model import open_model
from engine.norm import RMSNorm
from engine.short_convolution import ShortConvolution
from engine.state_space_mixer import OutputNorm, StateSpaceMixer
from engine.taps import tap
from parity import safetensors_file
from parity.models.bfloat16 import round_to_bfloat16
from parity.models.fetch import ensure_snapshot
from parity.models.tiny import write_snapshot
from parity.tensor import Tensor
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits, logits_of, raw_config

TAPS = "falcon_h1-tiny/f32/fp/forced/p40-taps-tail-split"
NORM = "falcon_h1_norm-tiny/f32/fp/forced/p40-taps-tail-split"
HUB = "falcon_h1-hub-tiny/f32/fp/forced/p40-tail-split"
SCAN = "model.layers.0.mamba"
ATTENTION = "model.layers.0.self_attn"

Plant = pytest.MonkeyPatch
Floats = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("falcon_h1-tiny")


def rounded(values: Floats) -> Floats:
    return Tensor.of(round_to_bfloat16(values.astype(np.float32)), "BF16").values().astype(np.float32)


def multiplied(config: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
    """What a hub snapshot's tensor becomes in a converted one, with numpy, each product rounded to bfloat16."""
    full = Config.read(config)
    whole = {
        "embed_tokens": full.embedding_multiplier,
        "lm_head": full.lm_head_multiplier,
        "q_proj": full.attention_in_multiplier,
        "k_proj": full.attention_in_multiplier,
        "o_proj": full.attention_out_multiplier,
        "out_proj": full.ssm_out_multiplier,
        "gate_proj": full.mlp_multipliers[0],
        "down_proj": full.mlp_multipliers[1],
    }
    if name.endswith("conv1d.weight"):
        channels, one, kernel = tensor.shape
        return replace(tensor, shape=(channels, kernel, one))
    module, _, leaf = name.rpartition(".")
    stem = module.rpartition(".")[2]
    values = tensor.values().astype(np.float32)
    if leaf != "weight" or (stem not in whole and stem != "in_proj"):
        return tensor
    if stem == "in_proj":
        d, gn = full.mamba_d_ssm, full.mamba_n_groups * full.mamba_d_state
        rows = np.repeat(np.float32(full.ssm_multipliers), [d, d, gn, gn, full.mamba_n_heads])
        factor = rounded(rounded(np.float32([full.ssm_in_multiplier])) * rounded(rows))[:, None]
    else:
        factor = rounded(np.float32([whole[stem]]))
    return Tensor.of(round_to_bfloat16((values * factor).astype(np.float32)), "BF16")


@pytest.mark.parametrize("name", ["falcon_h1", "falcon_h1_norm"])
def test_a_hub_snapshot_is_the_converted_one_with_its_multipliers_in_the_weights(
    tmp_path: Path, same_bits: Callable[..., None], name: str
) -> None:
    hub = ensure_snapshot(f"{name}-hub-tiny").path
    config = json.loads((hub / "config.json").read_text())
    stored = safetensors_file.loads((hub / "model.safetensors").read_bytes())
    write_snapshot(tmp_path, config, {n: multiplied(config, n, t) for n, t in stored.items()})
    same_bits(logits(tmp_path), logits(hub))


def test_a_converted_snapshot_is_not_multiplied_again(other_bits: Callable[..., None]) -> None:
    other_bits(logits_of("falcon_h1-tiny"), logits_of("falcon_h1-hub-tiny"))


def test_scan_and_attention_share_a_cache() -> None:
    model = open_model(ensure_snapshot("falcon_h1-tiny").path, dtype="f32")
    caches = model.make_caches()
    assert [cache.kind for cache in caches] == ["list[arrays-2,plain]"] * 4
    _, (first, *_) = model.hidden(mx.array([[1, 2, 3]]), caches)
    assert (first.offset, len(first.arrays)) == (3, 4)
    assert (model.vocabulary, model.head_width) == (512, 64)


def test_keys_and_values_beside_a_state_are_not_packed() -> None:
    model = open_model(ensure_snapshot("falcon_h1-tiny").path, dtype="f32")
    with pytest.raises(RequestError) as caught:
        steps(model, [1, 2], num_steps=1, kv=KVMode(bits=8, group_size=64))
    assert str(caught.value) == (
        "the model's keys and values cannot be packed\n"
        "  reason  falcon_h1 keeps keys and values beside the scan's state, where the oracle ignores the option silently\n"
        "  next    use the KV mode fp"
    )


def test_a_block_is_handed_a_group_of_caches() -> None:
    model = open_model(ensure_snapshot("falcon_h1-tiny").path, dtype="f32")
    (group, *rest) = model.make_caches()
    wrong = getattr(group, "members")[0]  # noqa: B009 - the protocol has no members
    with pytest.raises(TypeError, match=r"^a block of falcon_h1 was handed a cache of kind arrays-2$"):
        model.hidden(mx.array([[1]]), [wrong, *rest])


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("mamba_use_mlp", False)])
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    assert Config.read({**raw, key: FIXED[key]}) == Config.read(raw)
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, key: value})
    assert str(caught.value) == (
        f"falcon_h1 computes {key} {json.dumps(FIXED[key])} only\n"
        f"  found  {json.dumps(value)}\n"
        "  next   use a snapshot whose config.json says so"
    )


def test_a_scan_of_another_width_than_its_heads_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "mamba_d_ssm": 512})
    assert str(caught.value) == (
        "the width of the scan is not that of its heads\n"
        "  mamba d ssm    512\n"
        "  mamba n heads  8\n"
        "  mamba d head   32\n"
        "  next           mend config.json"
    )


def test_another_number_of_multipliers_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({**raw, "ssm_multipliers": [1.0, 2.0]})
    assert str(caught.value) == (
        "config.json has another number of multipliers\n"
        "  ssm multipliers  2 of 5\n"
        "  mlp multipliers  2 of 2\n"
        "  next             mend config.json"
    )


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, NORM, HUB])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_in_multiplier": 1.26},
        {"attention_out_multiplier": 0.93},
        {"embedding_multiplier": 5.7},
        {"mlp_multipliers": [0.89, 0.5859375]},
        {"mlp_multipliers": [0.8838834764831844, 0.59]},
        {"ssm_in_multiplier": 1.26},
        {"ssm_out_multiplier": 0.24},
        {"ssm_multipliers": [0.25, 0.3535533905932738, 0.3535533905932738, 0.5, 0.3535533905932738]},
    ],
    ids=lambda changes: f"{next(iter(changes))}-{str(next(iter(changes.values())))[:6]}",
)
def test_another_multiplier_of_a_hub_snapshot_is_found(monkeypatch: Plant, changes: dict[str, Any]) -> None:
    right = Config.read
    monkeypatch.setattr(Config, "read", lambda raw: right({**raw, **changes}))
    assert found(HUB) == ("DIFFERENT", None)


@needs_goldens
def test_multipliers_left_out_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr(falcon_h1, "multiply_weights", lambda *_: None)
    assert found(HUB) == ("DIFFERENT", None)


@needs_goldens
def test_multipliers_that_meet_cast_weights_are_found(monkeypatch: Plant) -> None:
    right = falcon_h1.multiply_weights

    def late(checkpoint: Any, config: Config) -> None:
        for name in checkpoint.names:
            checkpoint.replace([name], [name], lambda stored: [stored.astype(mx.float32)])
        right(checkpoint, config)

    monkeypatch.setattr(falcon_h1, "multiply_weights", late)
    assert found(HUB) == ("DIFFERENT", None)


@needs_goldens
def test_a_rope_base_that_is_off_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = falcon_h1.make_rope
    monkeypatch.setattr(falcon_h1, "make_rope", lambda width, **named: right(width, **{**named, "base": 1e10}))
    assert found(TAPS) == ("DIFFERENT", f"{ATTENTION}.o_proj")


@needs_goldens
def test_another_scale_of_the_scores_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = grouped_attention.attend
    monkeypatch.setattr(
        grouped_attention, "attend", lambda *args, scale, mask: right(*args, scale=scale * (1 + 2**-20), mask=mask)
    )
    assert found(TAPS) == ("DIFFERENT", f"{ATTENTION}.o_proj")


@needs_goldens
def test_logits_without_their_factor_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr(Model, "logits", lambda self, hidden: self.embedding.as_head(hidden))
    assert found(TAPS) == ("DIFFERENT", None)


@needs_goldens
def test_a_convolution_that_forgets_is_found_there(monkeypatch: Plant) -> None:
    right = ShortConvolution.__call__
    monkeypatch.setattr(ShortConvolution, "__call__", lambda self, x, _state, _ends=None: right(self, x, None))
    assert found(TAPS) == ("DIFFERENT", f"{SCAN}.conv1d")


@needs_goldens
def test_a_sum_in_another_order_is_found_in_the_norm_that_follows(monkeypatch: Plant) -> None:
    def other_order(self: Block, x: mx.array, cache: Any) -> Any:
        state, keys_and_values = cache.members
        normed = self.input_norm(x)
        mixed, state = self.mixer(normed, state)
        attended, keys_and_values = self.attention(normed, keys_and_values)
        h = x + (mixed + attended)
        return tap(self.path, h + self.mlp(self.mlp_norm(h))), cache.replaced(state, keys_and_values)

    monkeypatch.setattr(Block, "__call__", other_order)
    assert found(TAPS) == ("DIFFERENT", "model.layers.0.pre_ff_layernorm")


@needs_goldens
def test_an_output_that_is_not_gated_is_found_in_the_projection(monkeypatch: Plant) -> None:
    right = StateSpaceMixer.__call__

    def ungated(self: StateSpaceMixer, x: mx.array, cache: Any) -> Any:
        return right(replace(self, norm=lambda y, _gate: y), x, cache)

    monkeypatch.setattr(StateSpaceMixer, "__call__", ungated)
    assert found(TAPS) == ("DIFFERENT", f"{SCAN}.out_proj")


@needs_goldens
@pytest.mark.parametrize("change", [{"eps": 2e-6}, {"gate_first": False}, {"group": 128}], ids=lambda c: next(iter(c)))
def test_a_wrong_gated_norm_is_found_there(monkeypatch: Plant, change: dict[str, Any]) -> None:
    right = OutputNorm.__call__
    monkeypatch.setattr(OutputNorm, "__call__", lambda self, y, gate: right(replace(self, **change), y, gate))
    assert found(NORM) == ("DIFFERENT", f"{SCAN}.norm")


@needs_goldens
@pytest.mark.parametrize("path", ["model.layers.0.input_layernorm", "model.layers.1.pre_ff_layernorm"])
def test_a_wrong_epsilon_is_found_there(monkeypatch: Plant, path: str) -> None:
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        return right(replace(self, eps=1e-5) if self.path == path else self, x)

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", path)
