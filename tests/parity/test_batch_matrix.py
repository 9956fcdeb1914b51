"""`[[batch]]` tables become cases, and malformed ones an error that names file, table and key."""

from collections.abc import Callable
from pathlib import Path

import pytest

from parity.errors import CaseError
from parity.matrix import load_cases, placed_cases

PLANS = """
[plan.two]
lengths = [5, 2]
steps = [3, 1]

[plan.late]
lengths = [1, 4]
steps = [2, 2]
joins = [0, 3]
"""
TABLE = """
[[batch]]
snapshot = ["toy"]
dtype = ["f32", "bf16"]
kv = ["fp"]
drive = ["forced", "greedy"]
plan = ["two", "late"]
fill = ["right"]
feed = ["tail-split", "chunk3"]
vocabulary = 50
"""
LABEL = "[[batch]] at line 11"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "toy.toml").write_text(text)
        return tmp_path

    return write


def test_a_table_multiplies_into_cases(write: Callable[[str], Path]) -> None:
    cases = load_cases(write(PLANS + TABLE))
    assert len(cases) == 16
    assert cases[0].name == "toy/f32/fp/forced/batch-two-right-tail-split"
    assert cases[-1].name == "toy/bf16/fp/greedy/batch-late-right-chunk3"
    forced, greedy = cases[0], cases[-1]
    assert forced.batch is not None
    assert greedy.batch is not None
    assert (forced.batch.lengths, forced.batch.joins, greedy.batch.joins) == ((5, 2), (0, 0), (0, 3))
    assert (len(forced.prompt_ids), forced.num_steps, len(forced.forced_ids or ())) == (7, 4, 4)
    assert (greedy.forced_ids, forced.tier, forced.oracle) == (None, "L1", "mlx-lm")
    assert max(forced.prompt_ids) < 50
    assert cases[0].prompt_ids == cases[1].prompt_ids, "the same plan feeds the same tokens however they are fed"


def test_a_sequences_tokens_do_not_depend_on_its_neighbours(write: Callable[[str], Path]) -> None:
    (first, *_), (other, *_) = (
        load_cases(write(PLANS + TABLE)),
        load_cases(write(PLANS.replace("[5, 2]", "[5, 9]") + TABLE)),
    )
    assert first.prompt_ids[:5] == other.prompt_ids[:5]


def test_a_case_knows_its_line(write: Callable[[str], Path]) -> None:
    (_, place), *_ = placed_cases(write(PLANS + TABLE))
    assert (place.file, place.line) == ("toy.toml", 11)


@pytest.mark.parametrize(
    ("text", "table", "key", "reason"),
    [
        (PLANS + TABLE.replace('"fp"', '"kv"'), None, None, "unknown KV mode"),
        (PLANS + TABLE.replace('"chunk3"', '"whole"'), None, None, "does not fit its batch"),
        (PLANS + TABLE.replace('"bf16"', '"int8"'), LABEL, "dtype", "'int8' is none of f32"),
        (PLANS + TABLE.replace('"greedy"', '"free"'), LABEL, "drive", "'free' is none of greedy, forced"),
        (PLANS + TABLE.replace('"late"', '"soon"'), LABEL, "plan", "'soon' is none of two, late"),
        (PLANS + TABLE.replace('"right"', '"top"'), LABEL, "fill", "'top' is none of left, right, merged"),
        (PLANS + TABLE.replace("50", "0"), LABEL, "vocabulary", "at least 1 belongs here"),
        (PLANS + TABLE + "steps = 3\n", LABEL, "steps", "unknown; known are snapshot"),
        (PLANS + TABLE + 'oracle = "me"\n', LABEL, "oracle", "'me' is none of mlx-lm, mlx-optiq"),
        (PLANS + TABLE.replace(', "late"', ""), "[plan.late]", "late", "no [[batch]] uses this plan"),
        (PLANS.replace("[3, 1]", "[3]") + TABLE, "[plan.two]", "two", "a batch does not fit together"),
        (PLANS.replace("[3, 1]", '["3"]') + TABLE, "[plan.two]", "steps", "a list of whole numbers belongs here"),
        (PLANS.replace("joins", "leaves") + TABLE, "[plan.late]", "leaves", "unknown; known are lengths"),
        (PLANS + "[batch]\nplan = 1\n", "top level", "batch", "[[batch]] tables belong here"),
        ("plan = 3\n" + TABLE, "top level", "plan", "[plan.NAME] tables belong here"),
        (PLANS, "top level", "matrix", "at least one [[matrix]] table is needed"),
    ],
)
def test_a_malformed_table_is_refused_with_file_table_and_key(
    write: Callable[[str], Path], text: str, table: str | None, key: str | None, reason: str
) -> None:
    with pytest.raises(CaseError) as caught:
        load_cases(write(text))
    message = str(caught.value)
    assert reason in message
    if table is not None:
        assert f"  table   {table}\n" in message
        assert f"  key     {key}\n" in message
        assert "  file    toy.toml\n" in message
