"""A tokenizer of pieces and scores, rebuilt: the library reads it, and what the file does not say outright is handled."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from parity.errors import SnapshotError
from parity.models.gguf_pieces_tokenizer import merges, tokenizer_config_json, tokenizer_json

SPACE = "\u2581"
TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<unused0>",
    "a b",
    "a",
    "b",
    "ab",
    SPACE,
    f"{SPACE}a",
    f"{SPACE}ab",
    "aba",
]
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 3, 3, 4, *[1] * 7],
    "tokenizer.ggml.scores": [-1000.0] * 6 + [-9.0, -9.0, -1.0, -9.0, -2.0, -3.0, -1.0],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 3,
}


def test_the_library_reads_it_and_puts_the_first_token_in_front() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(METADATA))
    assert tokenizer.encode("ab ab").ids == [2, 8, 11]
    assert tokenizer.encode("ab ab", add_special_tokens=False).ids == [8, 11]
    assert tokenizer.encode("ab", "b").ids == [2, 8, 2, 7]
    assert tokenizer.decode([8, 11]) == "ab ab"


def test_users_own_pieces_get_their_spaces_back_and_only_known_control_tokens_are_special() -> None:
    whole = json.loads(tokenizer_json(METADATA))
    added = {token["id"]: (token["content"], token["special"]) for token in whole["added_tokens"]}
    assert added == {
        0: ("<pad>", True),
        1: ("<eos>", True),
        2: ("<bos>", True),
        3: ("<unk>", True),
        4: ("<unused0>", False),
        5: (f"a{SPACE}b", False),
    }
    assert whole["model"]["vocab"][f"a{SPACE}b"] == 5


def test_merges_come_by_score_then_by_the_length_of_left_and_right_then_by_id() -> None:
    tokens = ["a", "b", "ab", "ba", "aba", "abab"]
    assert merges(tokens, [0.0, 0.0, -1.0, -1.0, -1.0, 0.0]) == [
        ("aba", "b"),
        ("ab", "ab"),
        ("ab", "a"),
        ("a", "ba"),
        ("a", "b"),
        ("b", "a"),
    ]


def test_the_score_of_a_users_own_piece_is_none() -> None:
    # the users' piece "a_b" scores 0 instead of -1000, so the merge that makes it comes before all others
    tokens = ["<unk>", "a b", "a", "b", SPACE, f"a{SPACE}", "ab"]
    metadata = {
        **METADATA,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [-1000.0, -1000.0, -1.0, -1.0, -1.0, -2.0, -3.0],
        **{f"tokenizer.ggml.{role}_token_id": 0 for role in ("bos", "eos", "padding", "unknown")},
    }
    assert json.loads(tokenizer_json(metadata))["model"]["merges"] == [
        [f"a{SPACE}", "b"],
        ["a", SPACE],
        ["a", "b"],
    ]


def test_the_config_names_the_special_tokens() -> None:
    assert json.loads(tokenizer_config_json(METADATA, max_length=128)) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
    }


def test_another_kind_of_tokenizer_is_refused() -> None:
    with pytest.raises(SnapshotError) as caught:
        tokenizer_json({**METADATA, "tokenizer.ggml.model": "gpt2"})
    assert str(caught.value).splitlines()[:4] == [
        "the GGUF file's tokenizer cannot be rebuilt",
        "  model          gpt2",
        "  pre tokenizer  default",
        "  supported      llama with default",
    ]
