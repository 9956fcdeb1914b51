"""The gate is checked on both sides in turn, and a ratio counts only where all verdicts are the same."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gate_ratio import checked, measure_gate
from parity.errors import AssayError


def asking(plain_verdict: str, asked: list[str]) -> Any:
    def ask(side: str, pattern: str | None) -> dict[str, Any]:
        asked.append(f"{side} {pattern}")
        plain = side == "plain"
        return {
            "verdicts": {"a": plain_verdict if plain else "IDENTICAL"},
            "wall": 8.0 if plain else 2.0,
            "processor": 9.0,
        }

    return ask


@pytest.mark.parametrize(("verdict", "same"), [("IDENTICAL", True), ("DIFFERENT", False)])
def test_the_ratio_is_plain_over_kernels(verdict: str, *, same: bool) -> None:
    asked: list[str] = []
    wall, processor = measure_gate("x/*", repeats=2, on_progress=lambda _: None, ask=asking(verdict, asked))
    assert (wall.name, wall.peer, wall.ratio.median, wall.bits_identical) == ("gate/wall", "plain", 4.0, same)
    assert (processor.name, processor.ratio.median) == ("gate/processor", 1.0)
    assert wall.note.startswith("1 cases; ")
    assert asked == ["engine x/*", "plain x/*", "plain x/*", "engine x/*"]


def test_a_side_is_the_check_itself_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        seen.append((command[1:5], command[-1], options["env"].get("ASSAY_KERNELS")))
        return SimpleNamespace(stdout='{"cases": [{"case": "a", "status": "IDENTICAL"}]}', stderr="", returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("ASSAY_KERNELS", "linear")
    assert checked("engine", "x/*")["verdicts"] == checked("plain", "x/*")["verdicts"] == {"a": "IDENTICAL"}
    assert seen == [
        (["-m", "parity", "check", "--json"], "x/*", None),
        (["-m", "parity", "check", "--json"], "x/*", "plain"),
    ]


def test_a_check_without_verdicts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(stdout='{"error": {}}', stderr="one\ntwo\n", returncode=2)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(AssayError) as caught:
        checked("plain", None)
    assert str(caught.value).splitlines() == [
        "the check gave no verdicts",
        "  exit code   2",
        "  last lines  one",
        "              two",
        "  next        assay check",
    ]
