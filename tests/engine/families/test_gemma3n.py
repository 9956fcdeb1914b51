"""gemma3n: what it refuses, what it drops, and that planted faults are seen where they begin."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import learned_residual, per_layer_input
from engine.activation import geglu_approx, sparse_geglu
from engine.cache.convert import KVMode
from engine.cache.rotating import RotatingCache
from engine.errors import CheckpointError, ConfigError, RequestError
from engine.families import gemma3n
from engine.families.gemma3n import Block, Config
from engine.generate import steps
from engine.learned_residual import AltUp, Copies, Laurel
from engine.model import open_model
from engine.norm import RMSNorm
from engine.taps import tap
from parity.models.fetch import ensure_snapshot
from tests.engine.families.committed_golden import found, needs_goldens
from tests.engine.families.tiny_snapshot import logits, logits_of, raw_config

TAPS = "gemma3n-tiny/f32/fp/forced/p40-taps-tail-split"
LISTS = "gemma3n_listffn-tiny/f32/fp/forced/p40-taps-tail-split"
LAYERS = "model.language_model.layers"
SLIDING = f"{LAYERS}.0.self_attn.o_proj"  # the first projection after attention of a layer with a window
FULL = f"{LAYERS}.1.self_attn.o_proj"

Plant = pytest.MonkeyPatch
Change = Callable[[Any], Any]


@pytest.fixture
def raw() -> dict[str, Any]:
    return raw_config("gemma3n-tiny")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A snapshot that a test may change."""
    for file in ensure_snapshot("gemma3n-tiny").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def with_text(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**raw, "text_config": {**raw["text_config"], **changes}}


def test_layers_remember_a_window_or_all_and_those_that_share_nothing() -> None:
    model = open_model(ensure_snapshot("gemma3n-tiny").path, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0", "plain"] * 2
    assert (model.vocabulary, model.head_width) == (512, 64)
    with pytest.raises(RequestError) as caught:
        steps(model, [1], num_steps=1, kv=KVMode(bits=8))
    assert str(caught.value) == (
        "the model's keys and values cannot be packed\n"
        "  reason  its last layers ask earlier layers' caches for keys and values, which the oracle's packed caches do not "
        "give\n"
        "  next    use the KV mode fp"
    )


def test_towers_and_projections_that_nothing_reads_change_no_bit(
    copy: Path, edit_weights: Callable[..., None], same_bits: Callable[..., None]
) -> None:
    more = {f"model.{tower}.x": mx.zeros((2,)) for tower in ("vision_tower", "audio_tower", "embed_audio")}
    unread = f"{LAYERS}.5.self_attn.k_proj.weight"
    edit_weights(copy, {**more, unread: mx.ones((128, 128))})
    same_bits(logits_of("gemma3n-tiny"), logits(copy))


def test_projections_of_a_layer_that_reads_its_own_must_be_there(copy: Path, edit_weights: Callable[..., None]) -> None:
    edit_weights(copy, {f"{LAYERS}.3.self_attn.k_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"has no tensor model\.language_model\.layers\.3\.self_attn\.k_proj"):
        open_model(copy, dtype="f32")


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("attention_bias", True, "False"),
        ("hidden_activation", "silu", "gelu_pytorch_tanh"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "None"),
    ],
)
def test_what_it_does_not_compute_is_refused(raw: dict[str, Any], key: str, value: object, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read(with_text(raw, **{key: value}))
    assert str(caught.value) == (
        f"gemma3n computes one {key} only\n  found  {value}\n  known  {known}\n  next   mend config.json"
    )


MESSAGES = {
    "lists": (
        {"activation_sparsity_pattern": [0.5], "intermediate_size": [64, 64]},
        (
            "gemma3n needs lists that name every layer\n"
            "  num hidden layers            6\n"
            "  layer types                  6\n"
            "  intermediate size            2\n"
            "  activation sparsity pattern  1\n"
            "  next                         mend config.json"
        ),
    ),
    "sparsity": (
        {"activation_sparsity_pattern": [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]},
        "gemma3n needs sparsities from 0 to below 1\n  found  1.0\n  next   mend config.json",
    ),
    "kinds": (
        {"layer_types": ["full_attention"] * 6},
        (
            "gemma3n needs layers of both kinds, and a window\n"
            "  own layers      full_attention, full_attention, full_attention, full_attention\n"
            "  sliding window  16\n"
            "  next            mend config.json"
        ),
    ),
    "copies": (
        {"altup_active_idx": 4},
        (
            "gemma3n needs heads and copies that fit together\n"
            "  num attention heads  4\n"
            "  num key value heads  2\n"
            "  altup num inputs     4\n"
            "  altup active idx     4\n"
            "  next                 mend config.json"
        ),
    ),
}


@pytest.mark.parametrize("which", MESSAGES)
def test_numbers_that_do_not_fit_are_refused(raw: dict[str, Any], which: str) -> None:
    changes, message = MESSAGES[which]
    with pytest.raises(ConfigError) as caught:
        Config.read(with_text(raw, **changes))
    assert str(caught.value) == message


def test_an_unknown_key_is_refused_inside_and_beside_the_text_config(raw: dict[str, Any]) -> None:
    for config in (with_text(raw, laurels=1), {**raw, "laurels": 1}):
        with pytest.raises(ConfigError, match="config key 'laurels' is unknown"):
            Config.read(config)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_sparse_gate_lets_about_the_wanted_part_through(normal: Callable[..., mx.array], dtype: mx.Dtype) -> None:
    gate = normal(0, (4, 4096), dtype)
    for sparsity in (0.5, 0.95):
        kept = (sparse_geglu(sparsity)(gate, mx.ones_like(gate)) != 0).astype(mx.float32).mean().item()
        assert abs(kept - (1 - sparsity)) < 0.02


# planted faults


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, LISTS])
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert found(name) == ("IDENTICAL", None)


@needs_goldens
def test_a_window_off_by_one_is_found_in_the_first_attention(monkeypatch: Plant) -> None:
    right = RotatingCache.mask
    monkeypatch.setattr(RotatingCache, "mask", lambda self, L, *, window: right(self, L, window=window and window - 1))
    assert found(TAPS) == ("DIFFERENT", SLIDING)


@needs_goldens
@pytest.mark.parametrize(("base", "earliest"), [(1e4, SLIDING), (1e6, FULL)])
def test_a_rope_base_off_by_a_thousandth_is_found_in_the_first_attention_that_has_it(
    monkeypatch: Plant, base: float, earliest: str
) -> None:
    right = gemma3n.make_rope
    monkeypatch.setattr(
        gemma3n, "make_rope", lambda width, *, base: right(width, base=base * (1.001 if base == wrong else 1))
    )
    wrong = base
    assert found(TAPS) == ("DIFFERENT", earliest)


@needs_goldens
def test_an_earlier_donor_of_keys_and_values_is_found_in_the_first_layer_that_reads_them(monkeypatch: Plant) -> None:
    monkeypatch.setattr(gemma3n, "donors", lambda _kinds, *, shared: (0, 1, 2, 3, 0, 1) if shared == 2 else None)
    assert found(TAPS) == ("DIFFERENT", f"{LAYERS}.4.self_attn.o_proj")


@needs_goldens
@pytest.mark.parametrize(
    ("change", "earliest"),
    [
        pytest.param(lambda a: replace(a, active=0), f"{LAYERS}.0.altup.prediction_coefs", id="active"),
        pytest.param(lambda a: replace(a, width=64), f"{LAYERS}.0.altup.prediction_coefs", id="width"),
        pytest.param(
            lambda a: replace(a, router_norm=replace(a.router_norm, eps=1e-2)),
            f"{LAYERS}.0.altup.prediction_coefs",
            id="eps",
        ),
    ],
)
def test_a_wrong_prediction_is_found_in_its_coefficients(monkeypatch: Plant, change: Change, earliest: str) -> None:
    right = AltUp.predict
    monkeypatch.setattr(AltUp, "predict", lambda self, x: right(change(self), x))
    assert found(LISTS) == ("DIFFERENT", earliest)


@needs_goldens
def test_a_mixing_that_is_not_transposed_is_found_in_the_first_norm(monkeypatch: Plant) -> None:
    right = mx.array.swapaxes
    four = (2, 3)
    monkeypatch.setattr(
        mx.array, "swapaxes", lambda self, *axes: self if axes == four else right(self, *axes), raising=True
    )
    assert found(TAPS) == ("DIFFERENT", f"{LAYERS}.0.input_layernorm")


@needs_goldens
@pytest.mark.parametrize("name", [TAPS, LISTS])
def test_coefficients_that_are_not_clipped_are_found_there(monkeypatch: Plant, name: str) -> None:
    right = AltUp.take
    monkeypatch.setattr(AltUp, "take", lambda *args, clip, **more: right(*args, clip=clip * 100, **more))
    assert found(name) == ("DIFFERENT", f"{LAYERS}.0.altup.prediction_coefs")


@needs_goldens
@pytest.mark.parametrize(
    ("name", "scaled"),
    [pytest.param(TAPS, False, id="left-out"), pytest.param(LISTS, True, id="though-switched-off")],
)
def test_the_scale_of_the_corrected_copy_is_found_in_the_gate(monkeypatch: Plant, name: str, scaled: bool) -> None:
    right = Block.__call__
    monkeypatch.setattr(Block, "__call__", lambda self, *args: right(replace(self, scales_output=scaled), *args))
    assert found(name) == ("DIFFERENT", f"{LAYERS}.0.per_layer_input_gate")


@needs_goldens
def test_a_layer_without_its_low_rank_residual_is_found_there(monkeypatch: Plant) -> None:
    right = Laurel.__call__

    def wrong(self: Laurel, x: mx.array) -> mx.array:
        return tap(self.path, right(self, x) - x)

    monkeypatch.setattr(Laurel, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{LAYERS}.0.laurel")


@needs_goldens
@pytest.mark.parametrize(
    "wrong", [pytest.param(lambda _: geglu_approx, id="none"), pytest.param(lambda _: sparse_geglu(0.94), id="less")]
)
def test_another_sparsity_is_found_in_the_first_mlp(monkeypatch: Plant, wrong: Change) -> None:
    monkeypatch.setattr(gemma3n, "sparse_geglu", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{LAYERS}.0.mlp.down_proj")


@needs_goldens
def test_an_unknown_id_that_is_looked_up_is_found_in_its_layer_inputs(monkeypatch: Plant) -> None:
    right = per_layer_input.PerLayerInputs.__call__

    def without_floor(self: Any, ids: mx.array, x: mx.array) -> Any:
        return right(self, ids % self.vocabulary, x)

    monkeypatch.setattr(per_layer_input.PerLayerInputs, "__call__", without_floor)
    status, _ = found("gemma3n_listffn-tiny/f32/fp/forced/p40-tail-split")  # some of whose ids are beyond the table
    assert status == "DIFFERENT"


@needs_goldens
def test_copies_that_are_not_levelled_are_found_where_they_are_read(monkeypatch: Plant) -> None:
    monkeypatch.setattr(learned_residual, "_magnitude", lambda x: mx.ones_like(x[..., :1]))
    assert found(TAPS) == ("DIFFERENT", f"{LAYERS}.0.input_layernorm")


@needs_goldens
def test_the_sum_of_the_copies_in_place_of_their_mean_is_found_in_the_last_norm(monkeypatch: Plant) -> None:
    right = Copies.joined
    monkeypatch.setattr(Copies, "joined", lambda self, x: right(self, x) * 4)
    assert found(TAPS)[0] == "DIFFERENT"


@needs_goldens
def test_another_cap_of_the_logits_is_found_in_them(monkeypatch: Plant) -> None:
    right = gemma3n.soft_capped
    monkeypatch.setattr(gemma3n, "soft_capped", lambda x, cap: right(x, cap - 1))
    assert found(TAPS) == ("DIFFERENT", "model.language_model")


@needs_goldens
@pytest.mark.parametrize("leaf", ["self_attn.q_norm", "self_attn.k_norm", "laurel.post_laurel_norm"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _norm, x: x, id="skipped"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, norm.weight, norm.eps * 2), id="eps"),
        pytest.param(lambda norm, x: mx.fast.rms_norm(x, 1 + norm.weight, norm.eps), id="offset"),
    ],
)
def test_a_wrong_norm_is_found_there(monkeypatch: Plant, leaf: str, change: Callable[..., mx.array]) -> None:
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        return tap(self.path, change(self, x)) if self.path.endswith(leaf) else right(self, x)

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
    assert found(TAPS) == ("DIFFERENT", f"{LAYERS}.0.{leaf}")
