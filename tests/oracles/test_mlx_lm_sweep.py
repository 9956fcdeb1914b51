import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oracles.mlx_lm.sweep import rows, serve
from parity.sweeping.plan import PACKED, PLAIN, WEIGHTS, functions
from parity.sweeping.subject import Refused

sys.path.insert(0, str(Path(__file__).parent.parent / "parity" / "sweeping"))
from toy_subject import ToySubject


def opened(config: Mapping[str, Any], dtype: str) -> ToySubject:
    del dtype
    if config.get("broken"):
        raise ValueError("unknown model_type")
    if config.get("refused"):
        raise Refused("no such family")
    return ToySubject()


def asked(**request: Any) -> list[Any]:
    whole = {"models": {}, "functions": {}, "dtypes": ["f32"], "kvs": ["fp"], "patterns": [], "answered": [], **request}
    return list(rows(whole, opened, lambda _name: None))


def test_every_equality_is_asked_once_of_every_model_dtype_and_kv_mode() -> None:
    found = asked(models={"a": {}, "b": {}}, dtypes=["f32", "bf16"], kvs=["fp", "kv8-g32"])

    each = len(PLAIN) + len(PACKED) + len(WEIGHTS) + len(PACKED)
    assert len(found) == 2 * (2 * each + len(functions()))
    assert len({row.name for row in found}) == len(found)
    assert {row.outcome.kind for row in found} == {"equal"}


def test_a_model_that_cannot_be_opened_is_one_row_and_never_left_out() -> None:
    broken, refused = asked(models={"a": {"broken": True}, "b": {"refused": True}}, patterns=["?/*/one-by-one"])

    assert (broken.name, broken.outcome.kind) == ("a/f32/fp/opens", "raises")
    assert broken.outcome.detail == "ValueError: unknown model_type"
    assert (refused.name, refused.outcome.kind) == ("b/f32/fp/opens", "refused")


def test_what_was_answered_is_not_asked_again_and_patterns_choose() -> None:
    found = asked(models={"a": {}}, patterns=["a/f32/fp/batch-*"], answered=["a/f32/fp/batch-merged"])

    names = [row.invariance for row in found]
    assert "batch-filtered" in names
    assert "batch-merged" not in names
    assert all(name.startswith("batch-") for name in names)


def test_each_row_is_announced_before_it_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"models": {"a": {}}, "functions": {}, "dtypes": ["f32"], "kvs": ["fp"], "answered": []}
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**request, "patterns": ["a/*/fork-is-fresh", "a/*/in-pieces"]}))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)

    assert serve(str(file), opened) == 0

    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    assert lines[0] == {"asking": "a/f32/fp/opens"}
    assert [line["asking"] for line in lines[1:-1:2]] == ["a/f32/fp/in-pieces", "a/f32/fp/fork-is-fresh"]
    assert [line["row"]["invariance"] for line in lines[2:-1:2]] == ["in-pieces", "fork-is-fresh"]
    assert lines[-1] == {"done": 2}
    assert capsys.readouterr().out == ""
