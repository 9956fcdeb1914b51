"""A llama snapshot as a GGUF file, for the peer that reads nothing else: the same weights, in llama.cpp's own formats.

Guarantees: dense tensors become float32, which holds every bfloat16; 4-bit affine groups of 32 become Q4_1 and 8-bit ones
Q8_0, where their scales are exact float16 numbers: otherwise the snapshot is refused, so no peer runs on other weights. Files
are kept under ASSAY_HOME by the digest of the weights, and written whole or not at all.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parity.errors import SnapshotError
from parity.home import assay_home
from parity.models.gguf_llama import GLOBAL_NAMES, LAYER_NAMES
from parity.snapshot import Snapshot

GROUP: Final = 32
FORMAT: Final = 1  # of the files: a change here makes them anew
Array = npt.NDArray[Any]


def gguf_file(snapshot: Snapshot) -> Path:
    """The GGUF file of a snapshot, made where it is not there yet.

    Raises:
        SnapshotError: The snapshot is of another family, or its weights have no exact form.
    """
    digest = snapshot.files["model.safetensors"][:16]
    file = assay_home() / "bench" / "gguf" / f"{snapshot.name}-{digest}-v{FORMAT}.gguf"
    if file.is_file():
        return file
    if snapshot.config.get("model_type") != "llama" or snapshot.config.get("rope_scaling"):
        raise _refused(snapshot, f"model_type {snapshot.config.get('model_type')}")
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".partial")
    os.close(handle)
    try:
        _write(snapshot, Path(temporary))
        Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return file


def q4_1(codes: Array, scales: Array, biases: Array) -> Array:
    """Blocks [rows, groups * 20] of 4-bit codes [rows, columns]: step, minimum, then elements 0-15 low and 16-31 high."""
    block = codes.reshape(codes.shape[0], -1, GROUP).astype(np.uint8)
    nibbles = block[:, :, :16] | (block[:, :, 16:] << 4)
    parts = [_halves(scales), _halves(biases), nibbles]
    return np.ascontiguousarray(np.concatenate(parts, axis=2)).reshape(codes.shape[0], -1)


def q8_0(codes: Array, scales: Array) -> Array:
    """Blocks [rows, groups * 34] of codes from 0 to 255 that stand for codes - 128: step, then signed codes."""
    block = (codes.reshape(codes.shape[0], -1, GROUP).astype(np.int16) - 128).astype(np.int8).view(np.uint8)
    return np.ascontiguousarray(np.concatenate([_halves(scales), block], axis=2)).reshape(codes.shape[0], -1)


def permute_rows(rows: Array, heads: int) -> Array:
    """Rows of a q or k projection in the order of GGUF files: the two halves of each head alternate."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _write(snapshot: Snapshot, file: Path) -> None:
    config = snapshot.config
    writer = gguf.GGUFWriter(file, "llama")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    head_width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(snapshot.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_width)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokens(writer, snapshot)
    stored: Any = mx.load(str(snapshot.path / "model.safetensors"))
    names = _names(config["num_hidden_layers"], tied=config.get("tie_word_embeddings", False))
    for name, path in names.items():
        turned = {"attn_q": heads, "attn_k": kv_heads}.get(name.split(".")[-2])
        _add_tensor(writer, name, path, stored, snapshot=snapshot, heads=turned)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _names(layers: int, *, tied: bool) -> dict[str, str]:
    """GGUF names to module paths."""
    named = {name: path.removesuffix(".weight") for name, path in GLOBAL_NAMES.items()}
    if tied:
        del named["output.weight"]
    for i in range(layers):
        named |= {f"blk.{i}.{name}.weight": f"model.layers.{i}.{path}" for name, path in LAYER_NAMES.items()}
    return named


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, path: str, stored: dict[str, mx.array], *, snapshot: Snapshot, heads: int | None
) -> None:
    weight = stored[f"{path}.weight"]

    def ordered(rows: Array) -> Array:
        return rows if heads is None else permute_rows(rows, heads)

    if f"{path}.scales" not in stored:
        writer.add_tensor(name, ordered(np.array(weight.astype(mx.float32))))
        return
    scales, biases = (np.array(stored[f"{path}.{leaf}"].astype(mx.float32)) for leaf in ("scales", "biases"))
    per_word = scales.shape[1] * GROUP // weight.shape[1]  # elements a word
    bits = 32 // per_word
    words = np.array(weight)
    codes = np.stack([(words >> (bits * i)) & ((1 << bits) - 1) for i in range(per_word)], axis=-1)
    codes = codes.reshape(words.shape[0], -1)
    is_signed = bits == 8 and (biases.view(np.uint32) == (scales * np.float32(-128)).view(np.uint32)).all()
    if bits not in (4, 8) or (bits == 8 and not is_signed) or not _are_halves(scales, biases if bits == 4 else scales):
        raise _refused(snapshot, f"{path} of {bits} bits has no exact form")
    if bits == 4:
        blocks, kind = q4_1(codes, scales, biases), gguf.GGMLQuantizationType.Q4_1
    else:
        blocks, kind = q8_0(codes, scales), gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, ordered(blocks), raw_dtype=kind)


def _add_tokens(writer: gguf.GGUFWriter, snapshot: Snapshot) -> None:
    """Pieces, so that the file opens; prompts are ids, and nobody reads the text."""
    raw = json.loads((snapshot.path / "tokenizer.json").read_text(encoding="utf-8"))
    ids = dict(raw["model"]["vocab"]) | {entry["content"]: entry["id"] for entry in raw["added_tokens"]}
    pieces = {token_id: piece for piece, token_id in ids.items()}
    added = {entry["id"] for entry in raw["added_tokens"]}
    size = snapshot.config["vocab_size"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([pieces.get(i, f"<unused{i}>") for i in range(size)])
    writer.add_token_types([gguf.TokenType.CONTROL if i in added else gguf.TokenType.NORMAL for i in range(size)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(snapshot.config["bos_token_id"])
    writer.add_eos_token_id(snapshot.config["eos_token_id"])


def _halves(values: Array) -> Array:
    """Float16 numbers as two bytes each, [rows, groups, 2]."""
    return np.ascontiguousarray(values.astype("<f2"))[:, :, None].view(np.uint8)


def _are_halves(*arrays: Array) -> bool:
    return all(
        (values.astype("<f2").astype(np.float32).view(np.uint32) == values.view(np.uint32)).all() for values in arrays
    )


def _refused(snapshot: Snapshot, reason: str) -> SnapshotError:
    return SnapshotError(
        f"{snapshot.name} cannot be written as a GGUF file",
        reason=reason,
        known="llama with dense weights, or affine ones of 4 or 8 bits in groups of 32",
        next_step="leave llama.cpp out for this snapshot",
    )
