"""The llama graph: cutting or batching changes no bit, every tensor counts, what it does not compute is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.plain import PlainCache
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.generate import last_row
from engine.model import CausalModel, open_model
from engine.quantization import Quantization
from engine.taps import watching
from tests.engine.families.tiny_snapshot import logits_in_pieces

Check = Callable[..., None]
Llama = Callable[..., CausalModel]
IDS = [3, 17, 99, 0, 127, 64, 5, 5, 41, 88, 2]

dtypes = pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
variants = pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="tied"),
        pytest.param({"tie_word_embeddings": False}, id="untied"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"num_key_value_heads": 4}, id="no-groups"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 2.0}}, id="linear"),
        pytest.param({"rope_scaling": {"type": "yarn", "factor": 4.0}}, id="yarn"),
        pytest.param({"rope_traditional": True}, id="traditional"),
    ],
)


@dtypes
@variants
def test_all_at_once_is_one_by_one_is_any_pieces(
    llama: Llama, same_bits: Check, dtype: str, changes: dict[str, Any]
) -> None:
    model = llama(dtype, **changes)
    whole = logits_in_pieces(model, [IDS])
    for cuts in (range(1, len(IDS)), [4, 8], [1, 3, 10]):
        same_bits(whole, logits_in_pieces(model, [IDS], cuts=list(cuts)))


@dtypes
def test_equal_sequences_of_a_batch_are_the_one_alone(llama: Llama, same_bits: Check, dtype: str) -> None:
    model = llama(dtype)
    alone, both = logits_in_pieces(model, [IDS]), logits_in_pieces(model, [IDS, IDS])
    same_bits(alone, both[:1])
    same_bits(alone, both[1:])


@dtypes
def test_a_sequence_does_not_depend_on_its_neighbour(llama: Llama, same_bits: Check, dtype: str) -> None:
    model = llama(dtype)
    same_bits(logits_in_pieces(model, [IDS]), logits_in_pieces(model, [IDS[::-1], IDS], cuts=[5])[1:])


@dtypes
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_the_last_row_is_that_of_the_whole_product(
    llama: Llama, same_bits: Check, dtype: str, changes: dict[str, Any]
) -> None:
    model = llama(dtype, **changes)
    hidden, _ = model.hidden(mx.array([IDS]), model.make_caches())
    same_bits(model.logits(hidden)[:, -1], last_row(model, hidden))


@dtypes
def test_a_position_depends_on_what_came_before_and_on_nothing_after(
    llama: Llama, same_bits: Check, other_bits: Check, dtype: str
) -> None:
    model = llama(dtype)
    changed = [*IDS[:6], 1, *IDS[7:]]
    one, two = logits_in_pieces(model, [IDS]), logits_in_pieces(model, [changed])
    same_bits(one[:, :6], two[:, :6])
    for position in range(6, len(IDS)):
        other_bits(one[:, position], two[:, position])


def test_positions_count(llama: Llama, other_bits: Check) -> None:
    rows = logits_in_pieces(llama(), [[7, 7, 9, 7, 9]])
    other_bits(rows[:, 2], rows[:, 4])


def test_logits_have_the_dtype_asked_for(llama: Llama) -> None:
    for name, dtype in (("f32", mx.float32), ("bf16", mx.bfloat16), ("f16", mx.float16)):
        assert logits_in_pieces(llama(name), [IDS]).dtype == dtype


def test_a_tied_head_is_the_embedding(
    write_llama: Callable[..., Path], edit_weights: Check, llama: Llama, same_bits: Check, other_bits: Check
) -> None:
    folder = write_llama(tie_word_embeddings=False)
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    edit_weights(folder, {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    same_bits(logits_in_pieces(llama(), [IDS]), logits_in_pieces(open_model(folder, dtype="f32"), [IDS]))
    other_bits(logits_in_pieces(llama(), [IDS]), logits_in_pieces(llama(tie_word_embeddings=False), [IDS]))


def names() -> list[str]:
    linears = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    layer = [f"{p}.{kind}" for p in linears for kind in ("weight", "bias")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    ends = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    return ends + [f"model.layers.{i}.{name}" for i in range(2) for name in layer]


@pytest.mark.parametrize("name", names())
def test_every_tensor_counts(
    write_llama: Callable[..., Path],
    edit_weights: Check,
    llama: Llama,
    other_bits: Check,
    name: str,
) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    folder = write_llama(**changes)
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    factor = mx.linspace(0.5, 1.5, tensors[name].shape[-1])  # not a constant, which a norm or a softmax may cancel
    edit_weights(folder, {name: tensors[name] * factor})
    other_bits(logits_in_pieces(llama(**changes), [IDS]), logits_in_pieces(open_model(folder, dtype="f32"), [IDS]))


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-4},
        {"rope_theta": 10001.0},
        {"rope_traditional": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    ],
)
def test_every_number_of_the_config_counts(llama: Llama, other_bits: Check, change: dict[str, Any]) -> None:
    other_bits(logits_in_pieces(llama(), [IDS]), logits_in_pieces(llama(**change), [IDS]))


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
def test_a_packed_model_is_the_dequantised_one_in_float32(
    *,
    write_llama: Callable[..., Path],
    edit_json: Check,
    edit_weights: Check,
    same_bits: Check,
    bits: int,
    group_size: int,
) -> None:
    packed, dense = write_llama(intermediate_size=128), write_llama(intermediate_size=128)
    tensors = mx.load(str(packed / "model.safetensors"))
    assert isinstance(tensors, dict)
    words, values = {}, {}
    for name, array in tensors.items():
        if array.ndim == 2:
            parts = mx.quantize(array, group_size=group_size, bits=bits)
            module = name.removesuffix(".weight")
            words |= dict(zip((name, f"{module}.scales", f"{module}.biases"), parts, strict=True))
            values[name] = mx.dequantize(*parts, group_size=group_size, bits=bits)
    edit_weights(packed, words)
    edit_weights(dense, values)
    edit_json(packed / "config.json", quantization={"bits": bits, "group_size": group_size})
    expected = logits_in_pieces(open_model(dense, dtype="f32"), [IDS])
    same_bits(expected, logits_in_pieces(open_model(packed, dtype="f32"), [IDS]))


def test_heads_default_to_the_width_over_their_number(llama: Llama) -> None:
    assert llama(head_dim=None).head_width == 16
    assert llama().head_width == 32


@dtypes
def test_the_graph_is_its_formula(write_llama: Callable[..., Path], same_bits: Check, dtype: str) -> None:
    folder = write_llama()
    cast = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}[dtype]
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    w = {name.removesuffix(".weight"): array.astype(cast) for name, array in tensors.items()}
    x = w["model.embed_tokens"][mx.array([IDS])]
    for layer in ("model.layers.0", "model.layers.1"):
        n = mx.fast.rms_norm(x, w[f"{layer}.input_layernorm"], 1e-5)
        q, k, v = ((n @ w[f"{layer}.self_attn.{p}_proj"].T).reshape(1, len(IDS), -1, 32).swapaxes(1, 2) for p in "qkv")
        q, k = (mx.fast.rope(a, 32, traditional=False, base=10000.0, scale=1.0, offset=0) for a in (q, k))
        seen = mx.fast.scaled_dot_product_attention(q, k, v, scale=32**-0.5, mask="causal")
        x = x + seen.swapaxes(1, 2).reshape(1, len(IDS), -1) @ w[f"{layer}.self_attn.o_proj"].T
        n = mx.fast.rms_norm(x, w[f"{layer}.post_attention_layernorm"], 1e-5)
        gate, up = (n @ w[f"{layer}.mlp.{p}_proj"].T for p in ("gate", "up"))
        x = x + (gate * mx.sigmoid(gate) * up) @ w[f"{layer}.mlp.down_proj"].T
    expected = mx.fast.rms_norm(x, w["model.norm"], 1e-5) @ w["model.embed_tokens"].T
    same_bits(expected, logits_in_pieces(open_model(folder, dtype=dtype), [IDS]))  # type: ignore[arg-type]


# sliding layers


SLIDING: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 4}


def test_a_sliding_layer_keeps_a_ring_and_a_full_one_everything(llama: Llama) -> None:
    model = llama(layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0", "plain"]
    windows = llama(layer_types=["full_attention"] * 2, sliding_window=16).make_caches()
    assert [cache.kind for cache in windows] == ["plain", "plain"]


@dtypes
@pytest.mark.parametrize("cuts", [[], [6], [1, 2, 3], [3, 8], list(range(1, 11))])
def test_a_sliding_layer_sees_its_window_and_no_further(
    llama: Llama, same_bits: Check, other_bits: Check, dtype: str, cuts: list[int]
) -> None:
    model = llama(dtype, **SLIDING)
    one, two = logits_in_pieces(model, [IDS], cuts=cuts), logits_in_pieces(model, [[IDS[0], 1, *IDS[2:]]], cuts=cuts)
    for position in range(len(IDS)):
        (other_bits if 1 <= position < 1 + 4 else same_bits)(one[:, position], two[:, position])


@dtypes
def test_a_window_that_is_never_left_changes_nothing(llama: Llama, same_bits: Check, dtype: str) -> None:
    wide = llama(dtype, **SLIDING | {"sliding_window": len(IDS)})
    full = llama(dtype, num_hidden_layers=1)
    for cuts in ([], [6], list(range(1, 11))):
        same_bits(logits_in_pieces(full, [IDS], cuts=cuts), logits_in_pieces(wide, [IDS], cuts=cuts))


@dtypes
def test_a_layer_that_slides_is_attention_under_a_band(
    llama: Llama, same_bits: Check, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = logits_in_pieces(llama(dtype, **SLIDING), [IDS])
    positions = np.arange(len(IDS))
    reach = positions[:, None] - positions[None]
    band = mx.array((reach >= 0) & (reach < 4))
    monkeypatch.setattr(PlainCache, "mask", lambda *_, **__: band)
    same_bits(logits_in_pieces(llama(dtype, num_hidden_layers=1), [IDS]), whole)


def test_an_untied_head_has_nothing_that_may_be_left_over(
    write_llama: Callable[..., Path], edit_weights: Check
) -> None:
    folder = write_llama(tie_word_embeddings=False)
    edit_weights(folder, {"lm_head.bias": mx.zeros((128,))})
    with pytest.raises(CheckpointError, match=r"\n  tensors  lm_head\.bias\n"):
        open_model(folder, dtype="f32")


# taps


ONE_LAYER = [
    "model.embed_tokens",
    "model.layers.0.input_layernorm",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0.self_attn",
    "model.layers.0.post_attention_layernorm",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.0.mlp",
    "model.layers.0",
    "model.norm",
    "model",
]


@pytest.mark.parametrize(("tied", "expected"), [(True, ONE_LAYER), (False, [*ONE_LAYER, "lm_head"])])
def test_a_watcher_sees_every_module_once_in_execution_order(llama: Llama, tied: bool, expected: list[str]) -> None:
    seen: list[tuple[str, int]] = []
    model = llama(num_hidden_layers=1, tie_word_embeddings=tied)
    with watching(lambda path, value: seen.append((path, value.shape[1]))):
        logits_in_pieces(model, [IDS])
    assert seen == [(path, len(IDS)) for path in expected]


@dtypes
def test_watching_changes_no_bit(llama: Llama, same_bits: Check, dtype: str) -> None:
    model, seen = llama(dtype), []
    expected = logits_in_pieces(model, [IDS])
    with watching(lambda _, value: seen.append(value)):
        actual = logits_in_pieces(model, [IDS])
    mx.eval(seen)
    same_bits(expected, actual)


def test_every_module_path_is_that_of_a_checkpoint_tensor(llama: Llama, write_llama: Callable[..., Path]) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    tensors = mx.load(str(write_llama(**changes) / "model.safetensors"))
    assert isinstance(tensors, dict)
    seen: list[str] = []
    with watching(lambda path, _: seen.append(path)):
        logits_in_pieces(llama(**changes), [IDS])
    assert [path for path in seen if not any(name.startswith(f"{path}.") for name in tensors)] == []
    assert {name.rpartition(".")[0] for name in tensors} <= set(seen)


def test_weights_are_cast_once_to_the_dtype_asked_for(write_llama: Callable[..., Path], same_bits: Check) -> None:
    folder = write_llama(stored="BF16")
    source = Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization())
    cast = source.take("model.norm.weight", (64,))
    stored = mx.load(str(folder / "model.safetensors"))
    assert isinstance(stored, dict)
    words = np.array(stored["model.norm.weight"].view(mx.uint16)).astype(np.uint32) << 16
    same_bits(words.view(np.float32), np.array(cast))
