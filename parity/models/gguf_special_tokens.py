"""Special tokens in the metadata of a GGUF file, and what every rebuilt tokenizer says about them.

Holds what the kinds of tokenizers share; vocabulary, merges and processors are theirs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from parity.errors import SnapshotError

CONTROL: Final = 3  # kinds of tokens
USER_DEFINED: Final = 4
ROLES: Final = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}

Metadata = Mapping[str, Any]


def check_tokenizer(metadata: Metadata, *, model: str, pre: str) -> None:
    """Refuse a kind of tokenizer that is not rebuilt here: a guessed one gives ids that are nearly right.

    Raises:
        SnapshotError: It is not that model with that pre-tokenizer.
    """
    found = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if found != (model, pre):
        raise SnapshotError(
            "the GGUF file's tokenizer cannot be rebuilt",
            model=found[0],
            pre_tokenizer=found[1],
            supported=f"{model} with {pre}",
            next_step="use a snapshot that carries tokenizer.json, such as a folder or hub:org/name",
        )


def special_ids(metadata: Metadata) -> dict[str, int]:
    """Ids of the special tokens that the file names, by role (`bos_token`, `eos_token`, `pad_token`, `unk_token`)."""
    keys = {role: f"tokenizer.ggml.{name}_token_id" for role, name in ROLES.items()}
    return {role: int(metadata[key]) for role, key in keys.items() if key in metadata}


def generation_ids(metadata: Metadata) -> dict[str, int]:
    """What generation_config.json says: the ids of those that begin, end and pad a text."""
    return {f"{role}_id": token_id for role, token_id in special_ids(metadata).items() if role != "unk_token"}


def added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens` in tokenizer.json."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def tokenizer_config(metadata: Metadata, tokens: Sequence[str], *, max_length: int) -> dict[str, Any]:
    """tokenizer_config.json without a chat template; `tokens` is the vocabulary in the order of ids."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: tokens[i] for role, i in special_ids(metadata).items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
