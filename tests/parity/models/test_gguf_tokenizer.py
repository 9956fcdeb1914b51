import json

import pytest
from tokenizers import Tokenizer

from parity.errors import SnapshotError
from parity.models.gguf_special_tokens import generation_ids, special_ids
from parity.models.gguf_tokenizer import tokenizer_config_json, tokenizer_json

TOKENS = ["<s>", "</s>", "a", "b", "1", "2", "Ġ", "ab", "Ġab", "ÃŃ", "12", "bĠ"]
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1],
    "tokenizer.ggml.merges": ["b Ġ", "a b", "Ġ ab", "1 2"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages }}",
}


def test_the_library_reads_it_and_splits_digits_words_and_specials() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(METADATA))
    assert tokenizer.encode("ab ab12</s>").ids == [7, 8, 4, 5, 1]
    assert tokenizer.decode([7, 8, 4, 5, 1]) == "ab ab12"


def test_control_tokens_are_special_and_users_own_are_not() -> None:
    added = json.loads(tokenizer_json(METADATA))["added_tokens"]
    assert [(token["id"], token["special"], token["normalized"]) for token in added] == [
        (0, True, False),
        (1, True, False),
        (9, False, False),
    ]


def test_the_config_names_specials_and_template() -> None:
    assert json.loads(tokenizer_config_json(METADATA, max_length=128)) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "chat_template": "{{ messages }}",
    }
    assert special_ids(METADATA) == {"bos_token": 0, "eos_token": 1}
    more = METADATA | {"tokenizer.ggml.padding_token_id": 3, "tokenizer.ggml.unknown_token_id": 0}
    assert generation_ids(more) == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}


def test_another_pre_tokenizer_is_refused_not_guessed() -> None:
    with pytest.raises(SnapshotError) as caught:
        tokenizer_json(METADATA | {"tokenizer.ggml.pre": "qwen2"})
    assert str(caught.value) == (
        "the GGUF file's tokenizer cannot be rebuilt\n"
        "  model          gpt2\n"
        "  pre tokenizer  qwen2\n"
        "  supported      gpt2 with smollm\n"
        "  next           use a snapshot that carries tokenizer.json, such as a folder or hub:org/name"
    )
