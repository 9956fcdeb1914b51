"""`assay generate` on a small random model whose tokens are bytes, and on the real one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from engine.generate import forced, steps
from engine.model import open_model
from parity import cli
from parity.models.tiny import write_tiny
from parity.models.tiny_shapes import shapes
from parity.verbs import generate

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 258,
    "tie_word_embeddings": True,
}
STOP = 257


def byte_tokenizer() -> Backend:
    """One id a byte, 0 to 255, then <s> 256 and </s> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<s>", "</s>"])
    return built


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    folder = tmp_path / "small"
    write_tiny(folder, CONFIG, shapes(CONFIG), seed=0, dtype="F32")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str(), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}))
    (folder / "chat_template.jinja").write_text("<s>{{ messages[0]['role'] }}: {{ messages[0]['content'] }}")
    return str(folder)


@pytest.fixture
def picking(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], None]:
    """Make the engine pick given ids, whatever the model says."""

    def arrange(ids: list[int]) -> None:
        def scripted(*args: Any, **options: Any) -> Any:
            return steps(*args, **options | {"pick": forced(ids)})

        monkeypatch.setattr(generate, "steps", scripted)

    return arrange


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text).ids
    return ids


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["generate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_json_is_one_object_of_ids_text_and_why_it_ended(snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, snapshot, "hi", "--raw", "--max-tokens", "5")
    assert found.keys() == {"prompt_ids", "token_ids", "text", "finish_reason"}
    assert found["prompt_ids"] == ids_of("hi")
    expected = [step.token_id for step in steps(open_model(Path(snapshot), dtype="f32"), ids_of("hi"), num_steps=5)]
    assert STOP not in expected
    assert found["token_ids"] == expected
    assert found["text"] == byte_tokenizer().decode(expected)
    assert found["finish_reason"] == "length"


def test_the_prompt_goes_through_the_chat_template_unless_it_is_raw(
    snapshot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, snapshot, "hi", "--max-tokens", "1")
    assert found["prompt_ids"] == [256, *ids_of("user: hi")]


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(
    snapshot: str, picking: Callable[[list[int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    picking([*ids_of("Paris."), STOP, *ids_of("more")])
    found = answer(capsys, snapshot, "hi", "--raw")
    assert (found["text"], found["finish_reason"]) == ("Paris.", "stop")
    assert found["token_ids"] == ids_of("Paris.")


def test_a_stop_token_as_the_first_one_gives_an_empty_text(
    snapshot: str, picking: Callable[[list[int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    picking([STOP])
    assert answer(capsys, snapshot, "hi", "--raw")["text"] == ""
    assert cli.main(["generate", snapshot, "hi", "--raw"]) == 0
    assert capsys.readouterr().out == "\n"


@pytest.mark.parametrize(
    ("text", "printed"),
    [("Paris.", "Paris.\n"), ("naïve café €", "naïve café €\n"), ("two\nlines", "two\nlines\n")],
)
def test_plain_output_is_the_text_and_a_line_end(
    snapshot: str, picking: Callable[[list[int]], None], text: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    picking([*ids_of(text), STOP])
    assert cli.main(["generate", snapshot, "hi", "--raw"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (printed, "")


def test_a_character_that_never_got_complete_is_shown_as_such(
    snapshot: str, picking: Callable[[list[int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    picking([*ids_of("a€")[:-1], STOP])
    assert cli.main(["generate", snapshot, "hi", "--raw"]) == 0
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}\n"


def test_the_kv_mode_reaches_the_engine(snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", snapshot, "hi", "--raw", "--kv", "kv8-g64"]) == 2
    assert capsys.readouterr().err.startswith("the KV mode does not fit the model's heads\n  head width  32\n")
    assert answer(capsys, snapshot, "hi", "--raw", "--kv", "kv8-g32", "--max-tokens", "2")["finish_reason"] == "length"


@pytest.mark.parametrize("number", [0, -3])
def test_no_tokens_are_refused_before_the_model_is_looked_for(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "alpaca", "hi", "--max-tokens", str(number)]) == 2
    assert capsys.readouterr().err == (
        "nothing to generate\n"
        f"  max tokens  {number}\n"
        "  next        give --max-tokens 1 or more\n"
    )  # fmt: skip


def test_a_snapshot_without_a_tokenizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "llama-tiny", "hi"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "the snapshot has no usable tokenizer"
    assert lines[1] == "  file    llama-tiny/tokenizer.json"
    assert lines[-1] == "  next    give token ids, or use a snapshot with a tokenizer.json"


def test_a_snapshot_without_a_chat_template_says_how_to_do_without(
    snapshot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(snapshot) / "chat_template.jinja").unlink()
    assert cli.main(["generate", snapshot, "hi"]) == 2
    assert capsys.readouterr().err == (
        "the snapshot has no chat template\n"
        "  folder  small\n"
        "  next    give the text as it should be tokenised (assay generate --raw)\n"
    )


@pytest.mark.model
def test_the_real_model_knows_the_capital_of_france(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "smollm2-135m", "What is the capital of France?"]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_text_comes_from_the_kernels_that_are_asked_for(
    snapshot: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put: list[str] = []

    class Put:
        def put_into(self, model: Any, *, name: str) -> Any:
            put.append(name)
            return model

    monkeypatch.setattr(generate, "chosen_kernels", Put)
    assert cli.main(["generate", snapshot, "hi", "--max-tokens", "1"]) == 0
    monkeypatch.setattr(generate, "chosen_kernels", lambda: None)
    assert cli.main(["generate", snapshot, "hi", "--max-tokens", "1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert [len(name) for name in put] == [32]
