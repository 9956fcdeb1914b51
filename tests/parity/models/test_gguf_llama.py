import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from parity import safetensors_file
from parity.errors import SnapshotError
from parity.models.bfloat16 import round_to_bfloat16
from parity.models.gguf_llama import Form, convert, hub_name
from parity.models.gguf_repack import unpermute_rows
from parity.snapshot import Snapshot

Weights = dict[str, npt.NDArray[np.float32]]
HEADS = {"attn_q": 4, "attn_k": 2}


def converted(source: Path, tmp_path: Path, form: Form) -> Snapshot:
    folder = tmp_path / form
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    convert(source, folder, form)
    return Snapshot.read(folder)


def dense_bits(source: Path) -> dict[str, npt.NDArray[np.uint32]]:
    """What the gguf package dequantises, q and k rows put in hub order."""
    out = {}
    for tensor in GGUFReader(source).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        heads = HEADS.get(tensor.name.split(".")[-2])
        out[hub_name(tensor.name)] = (unpermute_rows(values, heads) if heads else values).view(np.uint32)
    return out


def test_unquantised_weights_come_through_bit_for_bit(
    make_gguf: Callable[..., Path], tmp_path: Path, weights: Weights
) -> None:
    snapshot = converted(make_gguf(quantised=False), tmp_path, "float32")
    actual = safetensors_file.loads((snapshot.path / "model.safetensors").read_bytes())
    assert set(actual) == {hub_name(name) for name in weights}
    for name, weight in weights.items():
        assert actual[hub_name(name)].dtype == "F32"
        assert np.array_equal(actual[hub_name(name)].bits(), weight.view(np.uint32)), name


def test_the_dense_form_holds_what_gguf_dequantises(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = make_gguf()
    snapshot = converted(source, tmp_path, "float32")
    actual = safetensors_file.loads((snapshot.path / "model.safetensors").read_bytes())
    expected = dense_bits(source)
    assert set(actual) == set(expected)
    assert all(np.array_equal(actual[name].bits(), expected[name]) for name in expected)


def test_the_bfloat16_form_is_the_dense_form_rounded_once(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = make_gguf()
    snapshot = converted(source, tmp_path, "bfloat16")
    actual = safetensors_file.loads((snapshot.path / "model.safetensors").read_bytes())
    for name, bits in dense_bits(source).items():
        assert actual[name].dtype == "BF16"
        assert np.array_equal(actual[name].bits(), round_to_bfloat16(bits.view(np.float32))), name
    assert snapshot.config["torch_dtype"] == "bfloat16"


def test_mlx_dequantises_the_packed_form_to_the_dense_form(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = make_gguf()
    snapshot = converted(source, tmp_path, "packed")
    stored: dict[str, Any] = mx.load(str(snapshot.path / "model.safetensors"))  # type: ignore[assignment]
    quantization = dict(snapshot.quantization or {})
    packed = 0
    for name, bits in dense_bits(source).items():
        path = name.removesuffix(".weight")
        if f"{path}.scales" not in stored:
            assert np.array_equal(np.array(stored[name]).view(np.uint32), bits), name
            continue
        packed += 1
        module = quantization.get(path, quantization)
        assert stored[f"{path}.scales"].dtype == mx.float32
        values = mx.dequantize(
            stored[name],
            stored[f"{path}.scales"],
            stored[f"{path}.biases"],
            group_size=module["group_size"],
            bits=module["bits"],
        )
        assert np.array_equal(np.array(values).view(np.uint32), bits), name
    assert packed == 15


def test_the_config_is_what_the_hub_would_have(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    snapshot = converted(make_gguf(), tmp_path, "packed")
    config = dict(snapshot.config)
    assert config.pop("quantization_config") == config["quantization"]
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "transformers_version": "4.57.3",
        "vocab_size": 48,
        "quantization": {
            "group_size": 32,
            "bits": 4,
            "mode": "affine",
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        },
    }
    assert json.loads((snapshot.path / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def test_the_same_file_converts_to_the_same_bytes(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = make_gguf()
    first = converted(source, tmp_path, "packed").files
    assert converted(source, tmp_path, "packed").files == first


@pytest.mark.parametrize("name", ["blk.0.attn_qkv.weight", "blk.0.attn_q.bias", "rope_freqs.weight"])
def test_a_tensor_that_no_llama_has_is_refused(name: str) -> None:
    with pytest.raises(SnapshotError, match=f"no llama model has\n  tensor  {name}"):
        hub_name(name)


def test_scaled_rope_is_refused_rather_than_dropped(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = make_gguf(extra={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(SnapshotError, match=r"unsupported  llama\.rope\.scaling\.type"):
        convert(source, tmp_path, "float32")


@pytest.mark.parametrize("kept", [2, 100, 3000])
def test_a_truncated_file_is_refused(make_gguf: Callable[..., Path], tmp_path: Path, kept: int) -> None:
    source = make_gguf()
    source.write_bytes(source.read_bytes()[:kept])
    with pytest.raises(SnapshotError, match="not a readable GGUF file"):
        convert(source, tmp_path, "float32")
    assert not (tmp_path / "model.safetensors").exists()


def test_weights_cut_short_are_refused(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = make_gguf()
    source.write_bytes(source.read_bytes()[:-500])
    with pytest.raises(SnapshotError, match="not a readable GGUF file"):
        convert(source, tmp_path, "float32")
