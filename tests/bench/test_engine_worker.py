"""The engine's worker loads, generates greedily, draws, and digests what it timed."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bench.engine_worker import EngineWorker
from bench.samplers import VOCABULARIES, likeliest, rows, samplers
from engine.sampling.chain import Chain
from engine.sampling.keys import SequentialKeys
from engine.sampling.picker import ChainPicker
from engine.sampling.processors import Processing
from parity.errors import AssayError
from parity.models.fetch import ensure_snapshot
from parity.models.tiny import write_tiny
from parity.models.tiny_shapes import shapes

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def loaded(tmp_path: Path) -> EngineWorker:
    write_tiny(tmp_path, CONFIG, shapes(CONFIG), seed=0, dtype="BF16")
    worker = EngineWorker()
    worker.load({"snapshot": str(tmp_path), "dtype": "f32"})
    return worker


def test_a_run_is_timed_and_repeatable(loaded: EngineWorker) -> None:
    first, second = (loaded.run({"prompt_ids": [1, 2, 3], "num_tokens": 4}) for _ in range(2))

    assert len(first["token_ids"]) == 4
    assert first["prompt_seconds"] > 0
    assert first["decode_seconds"] > 0
    assert (first["logits"], first["token_ids"]) == (second["logits"], second["token_ids"])


def test_other_prompts_give_other_digests(loaded: EngineWorker) -> None:
    one, other = (loaded.run({"prompt_ids": [1, 2, last], "num_tokens": 2}) for last in (3, 4))

    assert one["logits"] != other["logits"]


def test_running_before_loading_is_refused() -> None:
    with pytest.raises(AssayError, match="nothing is loaded"):
        EngineWorker().run({"prompt_ids": [1], "num_tokens": 1})


def test_a_snapshot_that_does_not_load_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(AssayError, match=r"config\.json cannot be read"):
        EngineWorker().load({"snapshot": str(tmp_path), "dtype": "f32"})


def draw(options: dict[str, Any], *, vocabulary: int = 64, num_draws: int = 8, seed: int = 7) -> dict[str, Any]:
    request = {"options": options, "seed": seed, "num_rows": 3, "vocabulary": vocabulary, "num_draws": num_draws}
    return EngineWorker().sample({**request, "prompt_ids": likeliest(rows(seed, 3, vocabulary))})


def test_draws_are_those_of_the_engines_picker_over_the_rows_in_turn() -> None:
    made, history = rows(7, 3, 64), likeliest(rows(7, 3, 64))
    pick = ChainPicker(
        Chain(temperature=9.0, top_k=40),
        history,
        keys=SequentialKeys.of(7),
        processing=Processing(repetition_penalty=1.3, logit_bias={history[0]: -100.0}),
    )
    expected = [pick(mx.array(made[i % 3][None]), i) for i in range(8)]
    options = {"temperature": 9.0, "top_k": 40, "repetition_penalty": 1.3, "logit_bias": {str(history[0]): -100.0}}

    answer = draw(options)

    assert answer["ids"] == expected
    assert len(set(expected)) > 3, "rows on which draws can differ"
    assert answer["seconds"] > 0


def test_draws_are_repeatable_and_follow_their_seed() -> None:
    options = {"temperature": 9.0}
    first, again, other = draw(options), draw(options), draw(options, seed=8)

    assert (first["ids"], first["rows"]) == (again["ids"], again["rows"])
    assert first["ids"] != other["ids"]
    assert first["rows"] != other["rows"]


def test_the_digest_of_rows_counts_every_draw() -> None:
    assert draw({}, num_draws=3)["rows"] != draw({}, num_draws=4)["rows"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top_k": 64, "temperature": 1.0}, "top_k is not a number of tokens to keep\n  given  64\n  known  1 to 63\n"),
        ({"temperature": -1.0}, "temperature is out of range\n  given  -1.0\n  known  0 or more\n"),
        ({"logit_bias": {"64": 1.0}}, "logit_bias names tokens outside the vocabulary\n  ids         64\n"),
        ({"top_q": 0.9}, "unknown option 'top_q'\n"),
        ({"top_k": "many"}, "unknown top_k 'many'\n"),
    ],
)
def test_options_that_do_not_fit_are_a_message(options: dict[str, Any], told: str) -> None:
    with pytest.raises(AssayError) as caught:
        draw(options)

    assert str(caught.value).startswith(told)


def test_no_draws_are_refused() -> None:
    with pytest.raises(AssayError) as caught:
        draw({}, num_draws=0)

    assert str(caught.value) == "nothing to draw\n  num draws  0\n  next       draw at least once"


NAMES = list(samplers([0]))


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_every_timed_sampler_changes_what_is_drawn(name: str) -> None:
    """Equal ids prove little where a filter keeps everything: so each option must show in them."""
    vocabulary = VOCABULARIES[0]
    history = likeliest(rows(42, 4, vocabulary))
    options = samplers(history)[name]

    def ids(chosen: dict[str, Any]) -> list[int]:
        request = {"options": chosen, "seed": 42, "num_rows": 4, "vocabulary": vocabulary, "num_draws": 16}
        answer: list[int] = EngineWorker().sample({**request, "prompt_ids": history})["ids"]
        return answer

    drawn = ids(options)
    without = {left_out: ids({n: v for n, v in options.items() if n != left_out}) for left_out in options}
    assert [left_out for left_out, other in without.items() if other == drawn] == (
        ["temperature"] if name == "greedy" else []
    )


@pytest.mark.parametrize("level", ["plain", "linear"])
def test_a_model_runs_on_the_kernels_asked_for_and_gives_the_same_rows(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path, CONFIG, shapes(CONFIG), seed=0, dtype="BF16")
    request = {"snapshot": str(tmp_path), "dtype": "f32", "threads": 1}
    plain, worker = EngineWorker(), EngineWorker()
    monkeypatch.setenv("ASSAY_KERNELS", "plain")
    plain.load(request)
    monkeypatch.setenv("ASSAY_KERNELS", level)
    loaded = worker.load(request)
    assert loaded["kernels"] == level
    assert loaded["seconds"] > 0
    run = {"prompt_ids": [1, 2, 3], "num_tokens": 4}
    assert worker.run(run)["logits"] == plain.run(run)["logits"]


def test_weights_are_counted_as_they_lie_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, CONFIG, shapes(CONFIG), seed=0, dtype="BF16")
    elements = 32 * (4 * 32 + 3 * 32 + 64)  # attention, MLP, and the tied head
    counted = {}
    for level in ("plain", "linear"):
        monkeypatch.setenv("ASSAY_KERNELS", level)
        counted[level] = EngineWorker().load({"snapshot": str(tmp_path), "dtype": "f32"})["weight_bytes"]
    assert counted["plain"] == 4 * elements
    assert 2 * elements <= counted["linear"] <= 8 * elements  # two bytes, and blocks that are not full


def test_keys_and_values_of_a_prompt_are_written_without_its_last_token(loaded: EngineWorker, tmp_path: Path) -> None:
    file = tmp_path / "kv.safetensors"
    assert loaded.export({"prompt_ids": [1, 2, 3, 4], "file": str(file)}) == {"positions": 3, "layers": 1}
    arrays: Any = mx.load(str(file))
    assert {name: array.shape for name, array in arrays.items()} == {"0.keys": (1, 2, 3, 16), "0.values": (1, 2, 3, 16)}


def test_a_ring_that_got_a_prompt_at_once_is_written_whole(tmp_path: Path) -> None:
    file, snapshot = tmp_path / "kv.safetensors", ensure_snapshot("gemma3_text-tiny")
    worker = EngineWorker()
    worker.load({"snapshot": str(snapshot.path), "dtype": "f32"})
    prompt_ids = list(range(1, 42))
    assert len(prompt_ids) > snapshot.config["sliding_window"] + 1
    worker.export({"prompt_ids": prompt_ids, "file": str(file)})
    arrays: Any = mx.load(str(file))
    assert {array.shape[2] for array in arrays.values()} == {40}


def test_memory_is_read(loaded: EngineWorker) -> None:
    assert loaded.read({"threads": 2, "mib": 1})["bytes_per_second"] > 0
