"""The table of KV modes has no hole, is read from cases and refusals, and the file holds the one that they give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.model import open_model
from parity.case import KV, Case
from parity.kv_mode_table import FILE, MODES, UNCOVERED, Row, main, markdown, mode_of, refusal, rows, uncovered
from parity.matrix import load_cases
from parity.models.fetch import ensure_snapshot


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        ("fp", "fp"),
        ("kv4-g32-s16", "kv"),
        ("kv8-g64-after-prompt", "kv after-prompt"),
        ("kv8-g64-from-empty", "kv from-empty"),
        ("config-8g64_0", "config"),
        ("max16-k4", "max"),
        ("max16-k4-kv8-g64-s9", "max kv"),
        ("kv8-g64-tiled512", "kv tiled"),
        ("config-8g64_0-tiled16-lifted", "kv tiled"),
    ],
)
def test_every_word_has_its_column(word: str, mode: str) -> None:
    assert mode_of(KV.parse(word)) == mode
    assert mode in MODES


@pytest.mark.model
def test_every_family_and_mode_has_cases_or_a_reason_and_the_file_says_which() -> None:
    table = rows(load_cases())
    assert uncovered(table) == []
    assert FILE.read_text(encoding="utf-8") == markdown(table), "run python -m parity.kv_mode_table"


@pytest.mark.model
def test_a_mode_without_cases_that_is_not_refused_is_a_hole() -> None:
    fewer = [c for c in load_cases() if not (c.snapshot.startswith("qwen2-") and mode_of(c.kv) == "config")]
    assert uncovered(rows(fewer)) == ["qwen2 (plain): config"]


@pytest.mark.model
def test_a_reason_is_the_engines_own() -> None:
    mamba = open_model(ensure_snapshot("mamba2-tiny").path, dtype="f32")
    llama = open_model(ensure_snapshot("llama-tiny").path, dtype="f32")
    assert refusal([mamba], "kv") == (
        "the model's keys and values cannot be packed: mamba2 has no keys and values; the oracle ignores the option silently"
    )
    assert refusal([mamba, llama], "kv") is None
    assert refusal([llama], "config") is None


def row(cells: dict[str, str], refused: set[str]) -> Row:
    full = {mode: cells.get(mode, "f32 mlx-lm") for mode in MODES}
    return Row(model_type="toy", caches=("plain",), cells=full, refused=frozenset(refused))


def test_equal_reasons_have_one_number() -> None:
    text = markdown([row({"kv": "no", "max": "never"}, {"kv", "max"}), row({"kv": "no"}, {"kv"})])
    lines = [line for line in text.splitlines() if line.startswith("| toy")]
    assert lines[0].split(" | ")[3] == lines[1].split(" | ")[3] == "refused 1"
    assert "refused 2" in lines[0]
    assert text.endswith("Refusals:\n\n1. no\n2. never\n")


def test_a_hole_is_named() -> None:
    assert uncovered([row({"max": UNCOVERED}, set())]) == ["toy (plain): max"]


def test_dtypes_and_oracles_are_told_apart(make_case: Callable[..., Case]) -> None:
    from parity.kv_mode_table import _described  # noqa: PLC0415 - the one way to see a cell alone

    lifted = make_case(kv=KV.parse("kv8-g64-tiled16-lifted"), oracle="mlx-optiq")
    cases = [lifted, replace(lifted, dtype="bf16", kv=KV.parse("kv8-g64-tiled512")), make_case(), make_case()]
    assert _described(cases) == "f32 mlx-lm; f32 lifted, bf16 mlx-optiq"


@pytest.mark.model
def test_the_command_says_whether_there_are_holes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path / "table.md")
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == FILE.read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith("rows; not covered: none\n")
