import json

import pytest

from parity.case import Case
from parity.cli import main
from parity.matrix import load_cases


def test_cases_are_listed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [case.name for case in load_cases()]
    told = {line.split()[0]: line.split()[1:] for line in lines}
    assert told["llama-tiny/f32/fp/forced/p40-whole"] == ["40", "tokens", "8", "steps", "L1", "mlx-lm"]


def test_a_pattern_narrows_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases", "llama-tiny/bf16/*/p1-*"]) == 0

    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert len(names) == 4
    assert all(name.startswith("llama-tiny/bf16/") for name in names)


def test_as_json_cases_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases", "--json"]) == 0

    raw = json.loads(capsys.readouterr().out)
    assert tuple(Case.from_json(case) for case in raw["cases"]) == load_cases()


def test_an_unknown_case_lists_the_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases", "llama-tiny/f32/fp/greedy/p40-hole"]) == 2

    err = capsys.readouterr().err
    assert err.startswith(
        "no case matches 'llama-tiny/f32/fp/greedy/p40-hole'\n  near   llama-tiny/f32/fp/greedy/p40-whole\n"
    )
