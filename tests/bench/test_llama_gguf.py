"""A snapshot and the GGUF file made from it hold the same weights: reading the file back with our own converter gives them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFReader

from bench import llama_gguf
from bench.llama_gguf import gguf_file, permute_rows, q4_1, q8_0
from parity.errors import SnapshotError
from parity.models.gguf_llama import convert_weights
from parity.models.gguf_repack import repack, unpermute_rows
from parity.models.tiny import write_tiny
from parity.models.tiny_shapes import shapes
from parity.snapshot import Snapshot

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
METADATA = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
Make = Callable[..., Snapshot]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A tiny snapshot with changes to its tensors; ASSAY_HOME is a folder of its own."""
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "home"))

    def made(change: Callable[[dict[str, mx.array]], dict[str, mx.array]] = lambda t: t, **config: Any) -> Snapshot:
        folder = tmp_path / "s"
        folder.mkdir()
        write_tiny(folder, CONFIG, shapes(CONFIG), seed=0, dtype="BF16")
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
        tokenizer = {"model": {"vocab": {f"t{i}": i for i in range(64)}, "merges": ["t 1"]}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        file = folder / "model.safetensors"
        tensors: Any = mx.load(str(file))
        changed = change(dict(tensors))
        mx.eval(changed)
        mx.save_safetensors(str(file), changed)
        files = {"model.safetensors": "0123456789abcdef" * 4}
        return Snapshot(
            path=folder,
            name="s",
            repo_id=None,
            revision=None,
            files=files,
            config={**CONFIG, **config},
            quantization=None,
        )

    return made


def read_back(file: Path, form: Any) -> dict[str, Any]:
    return dict(convert_weights(GGUFReader(file), METADATA, form).tensors)


def test_dense_weights_come_back_as_they_were(make: Make) -> None:
    snapshot = make()
    back = read_back(gguf_file(snapshot), "bfloat16")
    stored: Any = mx.load(str(snapshot.path / "model.safetensors"))
    assert back.keys() == stored.keys()
    for name, array in stored.items():
        assert (np.array(array.view(mx.uint16)) == back[name].bits()).all(), name


def packed(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Matrices of 4 bits, the embedding of 8, with scales and biases that float16 holds."""
    found: dict[str, mx.array] = {}
    for name, array in tensors.items():
        if array.ndim == 1:
            found[name] = array.astype(mx.float32)
            continue
        bits = 8 if "embed" in name else 4
        words, scales, biases = mx.quantize(array.astype(mx.float32), group_size=32, bits=bits)
        scales = mx.abs(scales).astype(mx.float16).astype(mx.float32)
        biases = scales * -128 if bits == 8 else biases.astype(mx.float16).astype(mx.float32)
        path = name.removesuffix(".weight")
        found |= {name: words, f"{path}.scales": scales, f"{path}.biases": biases}
    return found


def test_packed_weights_come_back_as_they_were(make: Make) -> None:
    snapshot = make(packed)
    back = read_back(gguf_file(snapshot), "packed")
    stored: Any = mx.load(str(snapshot.path / "model.safetensors"))
    assert back.keys() == stored.keys()
    for name, array in stored.items():
        assert (np.array(array.view(mx.uint32)) == back[name].bits()).all(), name


def test_a_scale_that_float16_does_not_hold_is_refused(make: Make) -> None:
    def change(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        found, name = packed(tensors), "model.layers.1.mlp.up_proj.scales"
        return {**found, name: found[name] * (1 + 2**-20)}

    with pytest.raises(SnapshotError) as caught:
        gguf_file(make(change))
    assert str(caught.value).splitlines() == [
        "s cannot be written as a GGUF file",
        "  reason  model.layers.1.mlp.up_proj of 4 bits has no exact form",
        "  known   llama with dense weights, or affine ones of 4 or 8 bits in groups of 32",
        "  next    leave llama.cpp out for this snapshot",
    ]


def test_another_family_is_refused(make: Make) -> None:
    with pytest.raises(SnapshotError, match="model_type qwen2"):
        gguf_file(make(model_type="qwen2"))


def test_a_file_is_made_once_for_the_same_weights_and_nothing_half_done_is_left(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make()

    def broken(*_: object) -> None:
        raise OSError("the disk is full")

    right = llama_gguf._write
    monkeypatch.setattr(llama_gguf, "_write", broken)
    with pytest.raises(OSError, match="the disk is full"):
        gguf_file(snapshot)
    monkeypatch.setattr(llama_gguf, "_write", right)
    file = gguf_file(snapshot)
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.setattr(llama_gguf, "_write", broken)
    assert gguf_file(snapshot) == file
    with pytest.raises(OSError, match="the disk is full"):
        gguf_file(replace(snapshot, files={"model.safetensors": "f" * 64}))


def test_blocks_and_rows_are_the_inverse_of_what_the_converter_undoes() -> None:
    random = np.random.default_rng(0)
    scales, biases = (random.integers(1, 50, (3, 2)).astype(np.float32) for _ in range(2))
    four, eight = random.integers(0, 16, (3, 64)), random.integers(0, 256, (3, 64))
    undone = repack(q4_1(four, scales, biases), "Q4_1")
    codes = np.stack([(undone.weight >> (4 * i)) & 15 for i in range(8)], axis=-1).reshape(3, 64)
    assert (codes == four).all()
    assert (undone.biases == biases).all()
    undone = repack(q8_0(eight, scales), "Q8_0")
    codes = np.stack([(undone.weight >> (8 * i)) & 255 for i in range(4)], axis=-1).reshape(3, 64)
    assert (codes == eight).all()
    rows = random.integers(0, 99, (8, 5))
    assert (unpermute_rows(permute_rows(rows, 2), 2) == rows).all()
    assert not (permute_rows(rows, 2) == rows).all()
