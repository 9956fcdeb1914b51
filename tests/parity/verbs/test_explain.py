import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from engine.families import qwen3
from parity.case import Case
from parity.cli import main
from parity.matrix import load_cases
from parity.models import tiny_catalogue
from parity.snapshot import Snapshot
from parity.verbs import explain
from tests.parity.explaining.runners import Plant, PlantedRunner

NAME = "qwen3-tiny/f32/fp/forced/p40-tail-split"


@pytest.fixture
def with_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Plant | None], None]:
    """Put an engine with a fault, or a right one, in the place of both sides."""

    def put(plant: Plant | None) -> None:
        source, _ = tiny_catalogue.digests()["qwen3-tiny"]
        tiny_catalogue.write(source, tmp_path / "qwen3-tiny")
        actual = PlantedRunner() if plant is None else PlantedRunner(plant=plant)
        sides = explain.Sides(
            snapshot=Snapshot.read(tmp_path / "qwen3-tiny"),
            expected=PlantedRunner(name="mlx-lm 0.32.2"),
            actual=actual,
            recorded_with="mlx-lm 0.32.2",
        )

        def sides_of(case: Case) -> explain.Sides:
            assert case.name == NAME
            return sides

        monkeypatch.setattr(explain, "sides_of", sides_of)

    return put


def base_off() -> Plant:
    right = qwen3.make_rope
    return lambda: mock.patch.object(qwen3, "make_rope", lambda w, *, base, **k: right(w, base=base * 1.001, **k))


def test_a_case_on_identical_input_is_said_to_be_so_and_exits_0(
    with_fault: Callable[[Plant | None], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_fault(None)
    assert main(["explain", NAME]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"{NAME} is bit-identical to mlx-lm 0.32.2: there is nothing to explain"
    )
    assert not (tmp_path / "home" / "reproducers").exists()


def test_a_difference_is_explained_and_exits_1_with_a_reproducer(
    with_fault: Callable[[Plant | None], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_fault(base_off())
    assert main(["explain", NAME, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["earliest"], told["position"], told["cause"], told["side"]) == (
        "model.layers.0.self_attn.o_proj",
        1,
        "logic",
        "engine",
    )
    folder = tmp_path / "home" / "reproducers" / NAME
    assert told["reproducer"] == str(folder)
    assert (folder / "reproduce.py").read_bytes() == explain.SCRIPTS["mlx-lm"].read_bytes()


def test_the_reproducer_goes_where_it_is_wanted_or_nowhere(
    with_fault: Callable[[Plant | None], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_fault(base_off())
    assert main(["explain", NAME, "--no-reproducer"]) == 1
    assert "reproducer" not in capsys.readouterr().out
    assert not (tmp_path / "home" / "reproducers").exists()
    assert main(["explain", NAME, "--reproducer", str(tmp_path / "here")]) == 1
    out = capsys.readouterr().out
    assert f"  reproducer  {tmp_path / 'here'}\n" in out
    assert (tmp_path / "here" / "model" / "config.json").is_file()


def test_a_pattern_of_several_cases_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "qwen3-tiny/f32/fp/forced/p40-*split"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("'qwen3-tiny/f32/fp/forced/p40-*split' means ")
    assert told.endswith("  next   name one of them; assay cases lists them\n")


def test_a_case_that_does_not_exist_is_refused_with_the_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "qwen3-tiny/f32/fp/forced/p40-tail-spilt"]) == 2
    assert NAME in capsys.readouterr().err


def test_what_is_compared_is_what_a_case_of_the_config_records() -> None:
    cases = load_cases()
    named = {case.name: case for case in cases}
    assert explain.recorded_of(named[NAME], cases) == ("*",)
    odd = next(case for case in cases if case.snapshot == "gemma3n-q4g32-tiny")
    (taps,) = (case for case in cases if case.snapshot == "gemma3n-tiny" and case.record)
    assert "*" not in taps.record
    assert explain.recorded_of(odd, cases) == explain.recorded_of(taps, cases) == taps.record


def test_the_script_needs_the_oracle_alone() -> None:
    source = explain.SCRIPTS["mlx-lm"].read_text()
    assert "from parity" not in source
    assert "from oracles" not in source
