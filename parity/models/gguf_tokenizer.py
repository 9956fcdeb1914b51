"""tokenizer.json and its companions, rebuilt from the metadata of a GGUF file.

Guarantees: for SmolLM2 the ids equal those of the published tokenizer on every string that was tried (spec: 0 of 200
mismatches), and the file's bytes are pinned by digest. Only byte-level BPE with the `smollm` pre-tokenizer is covered;
any other is refused, because a guessed pre-tokenizer gives ids that are nearly right.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from parity.errors import SnapshotError

CONTROL: Final = 3
USER_DEFINED: Final = 4
SPECIAL_ROLES: Final = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}

Metadata = Mapping[str, Any]


def tokenizer_json(metadata: Metadata) -> str:
    """Text of tokenizer.json.

    Raises:
        SnapshotError: The tokenizer is not byte-level BPE with the `smollm` pre-tokenizer.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise SnapshotError(
            "the GGUF file's tokenizer cannot be rebuilt",
            model=model,
            pre_tokenizer=pre,
            supported="gpt2 with smollm",
            next_step="use a snapshot that carries tokenizer.json, such as a folder or hub:org/name",
        )
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    types: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, tokens[i], special=kind == CONTROL)
            for i, kind in enumerate(types)
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(add_prefix_space=False)],
        },
        "post_processor": None,
        "decoder": _byte_level(add_prefix_space=True),
        "model": _bpe(tokens, metadata["tokenizer.ggml.merges"]),
    }
    return json.dumps(whole, ensure_ascii=False, indent=1)


def tokenizer_config_json(metadata: Metadata, *, max_length: int) -> str:
    """Text of tokenizer_config.json: special tokens and the chat template."""
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    whole: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: tokens[i] for role, i in special_ids(metadata).items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if "tokenizer.chat_template" in metadata:
        whole["chat_template"] = metadata["tokenizer.chat_template"]
    return json.dumps(whole, ensure_ascii=False, indent=1)


def special_ids(metadata: Metadata) -> dict[str, int]:
    """Ids of the special tokens that the file names, by role (`bos_token`, `eos_token`, `pad_token`, `unk_token`)."""
    keys = {role: f"tokenizer.ggml.{name}_token_id" for role, name in SPECIAL_ROLES.items()}
    return {role: int(metadata[key]) for role, key in keys.items() if key in metadata}


def _added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _byte_level(*, add_prefix_space: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}


def _bpe(tokens: Sequence[str], merges: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": list(merges),
    }
