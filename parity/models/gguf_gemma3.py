"""A GGUF file of a Gemma 3 text model as a hub-shaped snapshot in float32.

Guarantees: weights are the dequantised values exactly; norms, which such a file stores as 1 + w, give back the w that gives
exactly the stored value again, or the file is refused. Nothing is guessed but what no such file carries and every Gemma 3
shares: the base of the windowed layers' rotation and the pattern of layers. The folder's bytes depend on the GGUF file alone.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from parity.errors import SnapshotError
from parity.models import gguf_pieces_tokenizer as tokenizer
from parity.models.gguf_llama import NEXT, dense, read_gguf, shortest
from parity.models.gguf_special_tokens import generation_ids, special_ids
from parity.models.weights_file import known_order, write_weights
from parity.tensor import Tensor

LOCAL_BASE: Final = 10000.0  # of the rotation in layers with a window
PATTERN: Final = 6  # every sixth layer sees all positions
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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
REQUIRED: Final = (
    "gemma3.attention.head_count",
    "gemma3.attention.head_count_kv",
    "gemma3.attention.key_length",
    "gemma3.attention.layer_norm_rms_epsilon",
    "gemma3.attention.sliding_window",
    "gemma3.block_count",
    "gemma3.context_length",
    "gemma3.embedding_length",
    "gemma3.feed_forward_length",
    "gemma3.rope.freq_base",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.unknown_token_id",
)


def convert(source: Path, folder: Path, *, order: str | None = None) -> None:
    """Write a snapshot of `source` into `folder`, which must exist.

    Args:
        source: GGUF file of architecture `gemma3`.
        folder: Gets config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json.
        order: Key of `tensor_order.toml`; tensors lie sorted by name without one.

    Raises:
        SnapshotError: The file is not a readable GGUF file of a Gemma 3 text model, or a norm is not 1 + w of any w.
    """
    reader, metadata = read_gguf(source, architecture="gemma3", required=REQUIRED)
    tensors = convert_weights(reader)
    write_weights(folder / "model.safetensors", tensors, known_order(order, list(tensors)))
    texts = {
        "config.json": json.dumps(config_of(metadata, tied="lm_head.weight" not in tensors), indent=1, sort_keys=True),
        "generation_config.json": json.dumps(generation_ids(metadata), indent=1),
        "tokenizer.json": tokenizer.tokenizer_json(metadata),
        "tokenizer_config.json": tokenizer.tokenizer_config_json(
            metadata, max_length=int(metadata["gemma3.context_length"])
        ),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def convert_weights(reader: GGUFReader) -> dict[str, Tensor]:
    """Every tensor, dequantised, by its checkpoint name.

    Raises:
        SnapshotError: A tensor's name or block type is unknown, or a norm is not 1 + w of any w.
    """
    tensors: dict[str, Tensor] = {}
    for entry in reader.tensors:
        name = hub_name(entry.name)
        values = dense(entry, tuple(int(size) for size in reversed(entry.shape)))
        tensors[name] = Tensor.of(_less_one(values, entry.name) if name.endswith("norm.weight") else values)
    return tensors


def config_of(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json as the hub has it for a Gemma 3 text model."""
    roles = special_ids(metadata)
    width = int(metadata["gemma3.attention.key_length"])
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": roles["bos_token"],
        "eos_token_id": roles["eos_token"],
        "final_logit_softcapping": None,
        "head_dim": width,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": int(metadata["gemma3.embedding_length"]),
        "intermediate_size": int(metadata["gemma3.feed_forward_length"]),
        "max_position_embeddings": int(metadata["gemma3.context_length"]),
        "model_type": "gemma3_text",
        "num_attention_heads": int(metadata["gemma3.attention.head_count"]),
        "num_hidden_layers": int(metadata["gemma3.block_count"]),
        "num_key_value_heads": int(metadata["gemma3.attention.head_count_kv"]),
        "pad_token_id": roles.get("pad_token"),
        "query_pre_attn_scalar": width,
        "rms_norm_eps": shortest(metadata["gemma3.attention.layer_norm_rms_epsilon"]),
        "rope_local_base_freq": LOCAL_BASE,
        "rope_scaling": None,
        "rope_theta": shortest(metadata["gemma3.rope.freq_base"]),
        "sliding_window": int(metadata["gemma3.attention.sliding_window"]),
        "sliding_window_pattern": PATTERN,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "transformers_version": "4.57.3",  # without a version, transformers warns about the tokenizer of any local folder
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def hub_name(name: str) -> str:
    """Checkpoint name of a GGUF tensor, as on the hub.

    Raises:
        SnapshotError: No Gemma 3 tensor has this name.
    """
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    raise SnapshotError("the GGUF file holds a tensor that no Gemma 3 text model has", tensor=name, next_step=NEXT)


def _less_one(stored: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float32]:
    """The w of a stored 1 + w."""
    one = np.float32(1)
    weight: npt.NDArray[np.float32] = stored - one
    if not np.array_equal((weight + one).view(np.uint32), stored.view(np.uint32)):
        raise SnapshotError(
            "a norm of the GGUF file is not one more than any float32 weight",
            tensor=name,
            next_step=NEXT,
        )
    return weight
