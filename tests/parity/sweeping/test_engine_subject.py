from collections import Counter
from typing import Any

import pytest

from engine.cache.plain import PlainCache
from engine.cache.rotating import RotatingCache
from oracles.mlx_lm.sweep import rows
from parity.sweeping import engine_subject
from parity.sweeping.engine_subject import EngineSubject
from parity.sweeping.plan import ask, names
from parity.sweeping.row import Row

MODELS = ("llama", "gemma3_text", "qwen3_5", "falcon_h1")  # plain, rings, recurrent, lists of caches


def asked(model: str, *patterns: str, dtype: str = "f32", kvs: tuple[str, ...] = ("fp", "kv8-g32")) -> list[Row]:
    request: dict[str, Any] = {"models": {model: {"config": model}}, "functions": {"config": "llama"}, "answered": []}
    request |= {"dtypes": [dtype], "kvs": kvs, "patterns": [f"{model}/*", *patterns]}
    return list(rows(request, EngineSubject.opened, lambda _name: None))


@pytest.mark.parametrize("model", MODELS)
def test_every_equality_holds_of_the_engine_or_is_refused_with_a_reason(model: str) -> None:
    found = asked(model)

    assert [row for row in found if row.outcome.kind in ("logic", "raises")] == []
    assert all(row.outcome.detail for row in found if row.outcome.verdict == "refused")
    assert Counter(row.outcome.verdict for row in found)["equal"] >= 6


def test_the_engine_s_filters_and_packed_attention_hold_too() -> None:
    found = [row for row in asked("llama", "functions/*") if row.model == "functions"]

    assert len(found) >= 6
    assert {row.outcome.kind for row in found} <= {"equal", "refused"}


def test_what_the_engine_does_not_have_it_refuses() -> None:
    subject = EngineSubject.opened({"config": "llama"}, "f32")
    said = {name: ask(subject, name, "fp").detail for name in names("fp")}

    assert said["without-cache"] == "the engine has no run without caches"
    assert said["loop-speculative"] == "the engine does not speculate"
    assert said["compiled-or-not"] == "the engine compiles nothing"
    assert said["sanitised-twice"] == "the engine reads checkpoint tensors as they are and rearranges none"
    assert said["batch-stored"] == "a batch is not stored: its rows are, one by one"


def test_a_family_that_cannot_pack_says_why() -> None:
    subject = EngineSubject.opened({"config": "falcon_h1"}, "f32")

    outcome = ask(subject, "same-call-twice", "kv8-g32")

    assert outcome.verdict == "refused"
    assert ": " in outcome.detail


def test_a_cache_that_trims_one_too_few_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PlainCache.trim
    monkeypatch.setattr(PlainCache, "trim", lambda self, n: own(self, n - 1))

    assert ask(EngineSubject.opened({"config": "llama"}, "f32"), "trimmed-and-fed-again", "fp").kind == "logic"


def test_a_ring_that_forgets_its_order_in_a_file_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine_subject.load_caches

    def shifted(*given: Any, **options: Any) -> Any:
        loaded = own(*given, **options)
        caches = tuple(
            cache.append(cache.keys[:, :, :1], cache.values[:, :, :1])[0] if isinstance(cache, RotatingCache) else cache
            for cache in loaded.caches
        )
        return type(loaded)(caches=caches, tokens=loaded.tokens, fingerprints=loaded.fingerprints)

    monkeypatch.setattr(engine_subject, "load_caches", shifted)

    assert ask(EngineSubject.opened({"config": "gemma3_text"}, "f32"), "stored-and-read", "fp").kind == "logic"


def test_a_batch_that_mixes_its_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine_subject.filtered
    monkeypatch.setattr(engine_subject, "filtered", lambda caches, keep: own(caches, list(keep)[::-1]))

    assert ask(EngineSubject.opened({"config": "llama"}, "f32"), "batch-filtered", "fp").kind == "logic"
