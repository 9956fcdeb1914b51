"""tokenizer.json and its companions, rebuilt from the metadata of a GGUF file.

Guarantees: for SmolLM2 the ids equal those of the published tokenizer on every string that was tried (spec: 0 of 200
mismatches), and the file's bytes are pinned by digest. Only byte-level BPE with the `smollm` pre-tokenizer is covered;
any other is refused, because a guessed pre-tokenizer gives ids that are nearly right.
"""

import json
from collections.abc import Sequence
from typing import Any

from parity.models.gguf_special_tokens import (
    CONTROL,
    USER_DEFINED,
    Metadata,
    added_token,
    check_tokenizer,
    tokenizer_config,
)


def tokenizer_json(metadata: Metadata) -> str:
    """Text of tokenizer.json.

    Raises:
        SnapshotError: The tokenizer is not byte-level BPE with the `smollm` pre-tokenizer.
    """
    check_tokenizer(metadata, model="gpt2", pre="smollm")
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    types: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(i, tokens[i], special=kind == CONTROL)
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
    whole = tokenizer_config(metadata, tokens, max_length=max_length)
    if "tokenizer.chat_template" in metadata:
        whole["chat_template"] = metadata["tokenizer.chat_template"]
    return json.dumps(whole, ensure_ascii=False, indent=1)


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
