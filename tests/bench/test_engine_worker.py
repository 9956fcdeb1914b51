"""The engine's worker loads, generates greedily and digests what it timed."""

from pathlib import Path

import pytest

from bench.engine_worker import EngineWorker
from parity.errors import AssayError
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
