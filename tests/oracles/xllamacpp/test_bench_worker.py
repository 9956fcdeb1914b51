"""llama.cpp's worker asks for what a bench means, believes its own clock, and refuses an answer to another question."""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from parity.errors import OracleError


class Server:
    """Answers as llama.cpp's server does."""

    asked: list[dict[str, Any]]
    answer: dict[str, Any]

    def __init__(self, params: Any) -> None:
        Server.params = params

    def handle_completions(self, request: dict[str, Any]) -> Any:
        Server.asked.append(request)
        timings = {
            "prompt_n": len(request["prompt"]),
            "prompt_ms": 500.0,
            "predicted_n": request["n_predict"],
            "predicted_ms": 250.0,
        }
        return json.dumps({"timings": timings} | Server.answer)


def params() -> SimpleNamespace:
    return SimpleNamespace(
        model=SimpleNamespace(path=""), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = ModuleType("xllamacpp")
    fake.CommonParams, fake.Server = params, Server  # type: ignore[attr-defined]
    Server.asked, Server.answer = [], {}
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    monkeypatch.delitem(sys.modules, "oracles.xllamacpp.bench_worker", raising=False)
    made = importlib.import_module("oracles.xllamacpp.bench_worker").LlamaCppWorker()
    made.load({"file": "f.gguf", "threads": 3, "context": 64})
    return made


def test_a_model_is_opened_with_the_threads_asked_for(worker: Any) -> None:
    del worker
    opened: Any = Server.params  # type: ignore[attr-defined]
    assert (opened.model.path, opened.n_ctx, opened.cpuparams.n_threads, opened.cpuparams_batch.n_threads) == (
        "f.gguf",
        64,
        3,
        3,
    )
    assert Server.asked[0]["n_predict"] == 1


def test_a_run_is_greedy_whole_and_from_nothing(worker: Any) -> None:
    answer = worker.run({"prompt_ids": [5, 6, 7], "num_tokens": 4})
    assert (answer["prompt_seconds"], answer["decode_seconds"], answer["num_tokens"]) == (0.5, 0.25, 4)
    assert answer["peak_bytes"] > 0
    asked = Server.asked[-1]
    assert (asked["prompt"], asked["n_predict"], asked["temperature"]) == ([5, 6, 7], 4, 0.0)
    assert (asked["cache_prompt"], asked["ignore_eos"]) == (False, True)


def test_a_prompt_that_was_partly_remembered_is_no_measurement(worker: Any) -> None:
    Server.answer = {"timings": {"prompt_n": 1, "prompt_ms": 1.0, "predicted_n": 4, "predicted_ms": 1.0}}
    with pytest.raises(OracleError) as caught:
        worker.run({"prompt_ids": [5, 6, 7], "num_tokens": 4})
    assert str(caught.value).splitlines() == [
        "llama.cpp did not do what was asked",
        "  asked  3 tokens of a prompt, 4 after it",
        "  done   1 and 4",
        "  next   see what oracles/xllamacpp/bench_worker.py sends it",
    ]


def test_a_refusal_carries_its_reason(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "handle_completions", lambda *_: {"error": "the context is too short"})
    with pytest.raises(OracleError, match="the context is too short"):
        worker.run({"prompt_ids": [5], "num_tokens": 4})


def test_running_before_loading_is_refused(worker: Any) -> None:
    worker._server = None
    with pytest.raises(OracleError, match="nothing is loaded"):
        worker.run({"prompt_ids": [5], "num_tokens": 1})
