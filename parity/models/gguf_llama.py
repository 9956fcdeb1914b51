"""A GGUF file of a llama model as a hub-shaped snapshot.

Guarantees: dense forms hold the dequantised values exactly (float32) or rounded once to nearest even (bfloat16); the
packed form is a lossless repack (`gguf_repack`). Nothing is guessed: another architecture, an unknown tensor name or a
block type without an exact form is refused. The folder's bytes depend on the GGUF file and the form alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from parity.errors import SnapshotError
from parity.models import gguf_tokenizer
from parity.models.bfloat16 import round_to_bfloat16
from parity.models.gguf_repack import GROUP_SIZE, repack, unpermute_rows
from parity.models.gguf_special_tokens import generation_ids, special_ids
from parity.models.weights_file import known_order, write_weights
from parity.tensor import Tensor

Form = Literal["bfloat16", "float32", "packed"]
PLAIN: Final = ("F32", "F16", "BF16")
GLOBAL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
REQUIRED: Final = (
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
)
NEXT: Final = "convert it with its own tools, then name the resulting folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Converted weights.

    Attributes:
        tensors: Checkpoint name to stored bits.
        bits: Module path to bits, for packed modules.
    """

    tensors: Mapping[str, Tensor]
    bits: Mapping[str, int]


def convert(source: Path, folder: Path, form: Form, *, order: str | None = None) -> None:
    """Write a snapshot of `source` into `folder`, which must exist.

    Args:
        source: GGUF file of architecture `llama`.
        folder: Gets config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json.
        form: `bfloat16`, `float32`, or `packed` (codes as they are, scales and biases float32).
        order: Key of `tensor_order.toml`; tensors lie sorted by name without one.

    Raises:
        SnapshotError: The file is not a readable GGUF file of a llama model.
    """
    reader, metadata = read_gguf(source, architecture="llama", required=REQUIRED)
    weights = convert_weights(reader, metadata, form)
    write_weights(folder / "model.safetensors", weights.tensors, known_order(order, list(weights.tensors)))
    config = config_of(metadata, weights, "bfloat16" if form == "bfloat16" else "float32")
    texts = {
        "config.json": json.dumps(config, indent=1, sort_keys=True),
        "generation_config.json": json.dumps(generation_ids(metadata), indent=1),
        "tokenizer.json": gguf_tokenizer.tokenizer_json(metadata),
        "tokenizer_config.json": gguf_tokenizer.tokenizer_config_json(
            metadata, max_length=int(metadata["llama.context_length"])
        ),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def convert_weights(reader: GGUFReader, metadata: Mapping[str, Any], form: Form) -> Weights:
    """Convert every tensor.

    Raises:
        SnapshotError: A tensor's name or block type is unknown.
    """
    tensors: dict[str, Tensor] = {}
    bits: dict[str, int] = {}
    for entry in reader.tensors:
        name = hub_name(entry.name)
        shape = tuple(int(size) for size in reversed(entry.shape))
        heads = _heads(entry.name, metadata)
        kind = entry.tensor_type.name
        if form == "packed" and kind not in PLAIN:
            blocks = np.asarray(entry.data).reshape(shape[0], -1)
            try:
                packed = repack(unpermute_rows(blocks, heads) if heads else blocks, kind)
            except ValueError as error:
                raise SnapshotError(
                    "the GGUF file has no lossless packed form", tensor=entry.name, reason=error, next_step=NEXT
                ) from error
            path = name.removesuffix(".weight")
            bits[path] = packed.bits
            tensors[f"{path}.weight"] = Tensor.of(packed.weight)
            tensors[f"{path}.scales"] = Tensor.of(packed.scales)
            tensors[f"{path}.biases"] = Tensor.of(packed.biases)
            continue
        values = dense(entry, shape)
        if heads:
            values = unpermute_rows(values, heads)
        tensors[name] = Tensor.of(round_to_bfloat16(values), "BF16") if form == "bfloat16" else Tensor.of(values)
    return Weights(tensors=tensors, bits=bits)


def config_of(metadata: Mapping[str, Any], weights: Weights, dtype: str) -> dict[str, Any]:
    """config.json as the hub has it for a llama model, with a `quantization` entry for packed weights."""
    heads, width = int(metadata["llama.attention.head_count"]), int(metadata["llama.embedding_length"])
    special = special_ids(metadata)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": special["bos_token"],
        "eos_token_id": special["eos_token"],
        "pad_token_id": special.get("pad_token"),
        "head_dim": int(metadata.get("llama.attention.key_length", width // heads)),
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "rms_norm_eps": shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in weights.tensors,
        "torch_dtype": dtype,
        "transformers_version": "4.57.3",  # without a version, transformers warns about the tokenizer of any local folder
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    if weights.bits:
        exceptions = {path: {"group_size": GROUP_SIZE, "bits": n} for path, n in sorted(weights.bits.items()) if n != 4}
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine", **exceptions}
        config["quantization_config"] = config["quantization"]
    return config


def hub_name(name: str) -> str:
    """Checkpoint name of a GGUF tensor, as on the hub.

    Raises:
        SnapshotError: No llama tensor has this name.
    """
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    raise SnapshotError("the GGUF file holds a tensor that no llama model has", tensor=name, next_step=NEXT)


def read_gguf(source: Path, *, architecture: str, required: Sequence[str]) -> tuple[GGUFReader, dict[str, Any]]:
    """Open a GGUF file; returns its tensors and its metadata.

    Args:
        source: The file.
        architecture: What it must be of.
        required: Metadata keys that it must have.

    Raises:
        SnapshotError: It is unreadable, of another architecture, lacks a key, or scales its rotation.
    """
    try:
        reader = GGUFReader(source)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise SnapshotError(
            "not a readable GGUF file", file=source.name, reason=error, next_step="fetch it again"
        ) from error
    found = metadata.get("general.architecture")
    if found != architecture:
        raise SnapshotError(
            f"the GGUF file is not of a {architecture} model", file=source.name, architecture=found, next_step=NEXT
        )
    absent = [key for key in required if key not in metadata]
    scaled = [key for key in metadata if key.startswith(f"{architecture}.rope.scaling")]
    if absent or scaled:
        raise SnapshotError(
            "the GGUF file's metadata does not fit",
            file=source.name,
            absent=", ".join(absent) or "none",
            unsupported=", ".join(scaled) or "none",
            next_step=NEXT,
        )
    return reader, metadata


def dense(entry: ReaderTensor, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The values of a tensor, dequantised exactly.

    Raises:
        SnapshotError: Nobody knows how to dequantise its block type.
    """
    try:
        values = dequantize(entry.data, entry.tensor_type)
    except NotImplementedError as error:
        raise SnapshotError(
            "the GGUF file holds a block type that cannot be dequantised",
            tensor=entry.name,
            block_type=entry.tensor_type.name,
            next_step=NEXT,
        ) from error
    return np.asarray(values, dtype=np.float32).reshape(shape)


def _heads(name: str, metadata: Mapping[str, Any]) -> int | None:
    heads = int(metadata["llama.attention.head_count"])
    if name.endswith(".attn_q.weight"):
        return heads
    if name.endswith(".attn_k.weight"):
        return int(metadata.get("llama.attention.head_count_kv", heads))
    return None


def shortest(value: float) -> float:
    """A float32 constant as people write it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
