"""The tokenizer of a snapshot: which file is read, which ids stop a text, and that a text is opened once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.errors import RequestError
from engine.tokenizer import Tokenizer


def backend(template: str | None = "<s> $A") -> Backend:
    """Bytes as tokens, ids 0 to 255, then <s> 256 and </s> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<s>", "</s>"])
    if template:
        built.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 256), ("</s>", 257)]
        )
    return built


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return opened(tmp_path_factory.mktemp("tokenizer"))


def opened(folder: Path, template: str | None = "<s> $A", **files: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_text(backend(template).to_str(), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.open(folder)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    if "<s>" not in text and "</s>" not in text:
        ids = tokenizer.encode(text)
        assert ids[0] == 256
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, special=False) == ids[1:]


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [256, *tokenizer.encode("hi", special=False), 257]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, special=True) == "<s>hi</s>"


def test_a_text_that_opens_with_its_token_is_not_opened_twice(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert tokenizer.encode("<s>hi", special=False) == tokenizer.encode("hi")


def test_a_text_that_opens_with_its_token_twice_keeps_both(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<s><s>hi")[:3] == [256, 256, tokenizer.encode("h")[1]]


def test_a_tokenizer_that_opens_nothing_adds_nothing(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, template=None)
    assert tokenizer.encode("aab") == tokenizer.encode("aab", special=False)
    assert len(tokenizer.encode("aab")) == 3  # two equal letters are no doubled opening
    assert tokenizer.encode("") == []


def test_a_closing_token_stays(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, template="<s> $A </s>")
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert tokenizer.encode("hi")[-1] == 257
    assert tokenizer.encode("") == [256, 257]


def test_an_empty_text_between_two_equal_tokens_is_both(tmp_path: Path) -> None:
    assert opened(tmp_path, template="<s> $A <s>").encode("") == [256, 256]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": 2}}, {2}),
        ({"generation_config": {"eos_token_id": [2, 5]}, "config": {"eos_token_id": 9}}, {2, 5}),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 9}}, {0}),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, {9}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [9]}}, {9}),
        ({"config": {"eos_token_id": 9}}, {9}),
        ({"config": {}}, set()),
        ({}, set()),
    ],
)
def test_stop_ids_are_those_of_generation_config_else_of_config(
    tmp_path: Path, files: dict[str, Any], expected: set[int]
) -> None:
    assert opened(tmp_path, **files).stop_ids == expected


@pytest.mark.parametrize("content", [None, "", "garbage", "{}", '{"model": {"type": "Nonsense"}}'])
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(RequestError) as caught:
        Tokenizer.open(tmp_path)
    what, file, reason, next_step = str(caught.value).splitlines()
    assert what == "the snapshot has no usable tokenizer"
    assert file == f"  file    {tmp_path.name}/tokenizer.json"
    assert reason.startswith("  reason  ")
    assert next_step == "  next    give token ids, or use a snapshot with a tokenizer.json"
