"""Refused cells are read from the table, put to the oracles one by one, and one that runs after all is told."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from oracles import refused_modes
from oracles.process import Event, Task
from oracles.refused_modes import TABLE, WORDS, Refusal, ask, questions, refusals
from oracles.registry import Oracle, find_oracle
from parity.errors import OracleError
from parity.kv import KV
from tests.oracles.shop import make_case

TEXT = """| mode | word | what it is |
| --- | --- | --- |
| kv | `kv8-g64` | refused here is no cell |

| family | caches | fp | kv | config |
| --- | --- | --- | --- | --- |
| gemma2 | plain | f32 mlx-lm | refused 1 | refused 1 |
| qwen3 | plain | f32 mlx-lm | f32 mlx-lm | f32 mlx-optiq |
| kimi_linear | arrays-4, plain | f32 mlx-lm | f32 mlx-lm | refused 2 |

Refusals:

1. a reason
"""


def test_refused_cells_are_read_with_their_row_and_column() -> None:
    assert refusals(TEXT) == (
        Refusal(model_type="gemma2", caches=("plain",), mode="kv"),
        Refusal(model_type="gemma2", caches=("plain",), mode="config"),
        Refusal(model_type="kimi_linear", caches=("arrays-4", "plain"), mode="config"),
    )


def test_the_committed_table_can_be_read() -> None:
    found = refusals(TABLE.read_text(encoding="utf-8"))
    assert {"mamba2", "falcon_h1", "gemma3n", "kimi_linear"} <= {refusal.model_type for refusal in found}
    assert {refusal.mode for refusal in found} == set(WORDS)


@pytest.mark.parametrize(
    ("text", "refused", "unknown"), [("", 0, "none"), (TEXT.replace("| kv | config", "| kv | turbo"), 3, "turbo")]
)
def test_a_table_that_cannot_be_read_is_an_error(text: str, refused: int, unknown: str) -> None:
    with pytest.raises(OracleError) as caught:
        refusals(text)
    assert str(caught.value) == (
        "the table of KV modes cannot be read\n"
        f"  refused  {refused}\n"
        f"  unknown  {unknown}\n"
        "  next     python -m parity.kv_mode_table, and compare its columns with oracles/refused_modes.py"
    )


def test_every_word_is_of_its_column() -> None:
    for word in WORDS.values():
        assert KV.parse(word.replace("{all}", "0_1")).packs or word.startswith("max")


def caches_of(config: str) -> tuple[str, ...]:
    kinds = {"gemma2": ("plain",) * 3, "kimi_linear": ("arrays-4", "plain")}
    return kinds.get(config, ("rotating-w8-k0",))


@pytest.mark.parametrize(
    ("oracle", "names"),
    [
        ("mlx-lm", ["gemma2-tiny/f32/kv8-g32/refused/mlx-lm"]),
        (
            "mlx-optiq",
            [
                "gemma2-tiny/f32/kv8-g32/refused/mlx-optiq",
                "gemma2-tiny/f32/config-8g32_0_1_2/refused/mlx-optiq",
                "kimi_linear-tiny/f32/config-8g32_0_1/refused/mlx-optiq",
            ],
        ),
    ],
)
def test_each_cell_is_one_question_to_each_oracle_that_has_the_mode(oracle: str, names: list[str]) -> None:
    cases = list(questions(refusals(TEXT), find_oracle(oracle), caches_of))
    assert [case.name for case in cases] == names
    assert {case.oracle for case in cases} == {oracle}


def test_what_an_oracle_ran_or_never_answered_is_told(monkeypatch: pytest.MonkeyPatch, oracle: Oracle) -> None:
    monkeypatch.setattr(refused_modes, "ensure_snapshot", lambda _name: _Place(oracle.lock.parent))
    cases = [make_case(f"tiny/{name}") for name in ("refused", "also", "ran", "silent")]

    def run(_oracle: Oracle, tasks: Sequence[Task]) -> Iterator[Event]:
        yield Event(job=0, kind="ready")
        for task in tasks[:3]:
            yield Event(job=0, kind="started", case=task.name)
            kind = "finished" if task.name == "tiny/ran" else "failed"
            yield Event(job=0, kind=kind, case=task.name, facts={"kind": "TypeError", "message": "no\nmore"})
        yield Event(job=0, kind="ended", facts={"code": 1})

    said, ran = ask(cases, oracle, run)
    assert said == {"TypeError: no": 2}
    assert ran == ["tiny/ran", "tiny/silent"]


class _Place:
    """A snapshot that is nothing but a place."""

    def __init__(self, path: Path) -> None:
        self.path = path


@pytest.mark.parametrize(("ran", "code"), [([], 0), (["toy/kv8-g64"], 1)])
def test_the_command_fails_where_an_oracle_ran_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ran: list[str], code: int
) -> None:
    monkeypatch.setattr(refused_modes, "_caches_of", caches_of)
    monkeypatch.setattr(refused_modes, "ask", lambda *_: (refused_modes.Counter({"TypeError: no": 3}), ran))
    assert refused_modes.main() == code
    out = capsys.readouterr().out
    assert "mlx-optiq 0.7.7: 3 refused\n     3 TypeError: no\n" in out
    assert ("RAN, or no answer: toy/kv8-g64" in out) == bool(ran)
