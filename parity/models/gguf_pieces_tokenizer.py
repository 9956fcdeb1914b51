"""tokenizer.json of a Gemma 3 model, rebuilt from the pieces and scores in the metadata of a GGUF file.

Guarantees: for Gemma 3 270M the result equals the published tokenizer.json (spec: vocabulary, all 514,906 merges in their
order, added tokens, processors) but for one id beyond the vocabulary, and its bytes are pinned by digest. Three things that
the file does not say outright: pieces that users defined are stored with plain spaces, their scores are no scores, and only
eight of the control tokens are special. Any other kind of tokenizer is refused.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from parity.models.gguf_special_tokens import (
    CONTROL,
    USER_DEFINED,
    Metadata,
    added_token,
    check_tokenizer,
    tokenizer_config,
)

SPACE: Final = "\u2581"  # what a space is in a piece
SPECIAL: Final = frozenset(
    {"<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"}
)


def tokenizer_json(metadata: Metadata) -> str:
    """Text of tokenizer.json.

    Raises:
        SnapshotError: The tokenizer is not made of pieces and scores.
    """
    check_tokenizer(metadata, model="llama", pre="default")
    kinds: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    tokens = pieces(metadata)
    bos = int(metadata["tokenizer.ggml.bos_token_id"])
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(i, tokens[i], special=tokens[i] in SPECIAL)
            for i, kind in enumerate(kinds)
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": _starts_with(bos, tokens[bos]),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[int(metadata["tokenizer.ggml.unknown_token_id"])],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges(tokens, scores(metadata)),
        },
    }
    return json.dumps(whole, ensure_ascii=False, indent=1)


def tokenizer_config_json(metadata: Metadata, *, max_length: int) -> str:
    """Text of tokenizer_config.json: special tokens; the base model has no chat template."""
    whole = tokenizer_config(metadata, pieces(metadata), max_length=max_length)
    return json.dumps(whole, ensure_ascii=False, indent=1)


def pieces(metadata: Metadata) -> list[str]:
    """The vocabulary, in the order of ids, with spaces as the tokenizer writes them."""
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    return [
        token.replace(" ", SPACE) if kind == USER_DEFINED else token for token, kind in zip(tokens, kinds, strict=True)
    ]


def scores(metadata: Metadata) -> list[float]:
    """The scores, in the order of ids; 0 for pieces that users defined."""
    kinds: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    given: Sequence[float] = metadata["tokenizer.ggml.scores"]
    return [0.0 if kind == USER_DEFINED else score for score, kind in zip(given, kinds, strict=True)]


def merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best first.

    A split is as good as its whole piece's score, then the longer its left and its right part are; splits that are equal in
    all of these stay in the order of the whole's id, then of the left part's and the right part's.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, str, str]] = []
    for whole, score in zip(tokens, scores, strict=True):
        splits = [(whole[:cut], whole[cut:]) for cut in range(1, len(whole))]
        known = [split for split in splits if split[0] in ids and split[1] in ids]
        found += [(score, *split) for split in sorted(known, key=lambda split: (ids[split[0]], ids[split[1]]))]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _starts_with(token_id: int, token: str) -> dict[str, Any]:
    """A processor that puts a token before each text."""

    def part(text: str, number: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": token, "type_id": number}},
            {"Sequence": {"id": text, "type_id": number}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
