import json
from pathlib import Path
from typing import Any

import pytest

from parity.errors import UsageError
from parity.reporting.results import load, load_check, save_check
from parity.verdict import Verdict


def test_a_check_comes_back_as_it_was_kept(check: dict[str, Any], tmp_path: Path) -> None:
    file = save_check(tmp_path / "new", check)

    assert load_check(tmp_path / "new") == check
    assert json.loads(file.read_text()) == check


def test_each_case_is_a_line_so_that_it_can_be_found(check: dict[str, Any], tmp_path: Path) -> None:
    lines = save_check(tmp_path, check).read_text().splitlines()

    assert [sum(case["case"] in line for line in lines if '"tensors"' in line) for case in check["cases"]] == [1, 1, 1]


def test_the_promised_keys_are_kept_with_what_a_report_needs(
    check: dict[str, Any], verdicts: tuple[Verdict, ...]
) -> None:
    row = check["cases"][1]

    assert verdicts[1].to_json().items() <= row.items()
    assert check["counts"] == {"IDENTICAL": 2, "DIFFERENT": 1}
    assert row["place"] == {"file": "parity/cases/toy.toml", "line": 7}
    assert (row["passes"], row["first_step"], row["earliest"], row["num_differing"]) == (False, 1, "model.layers.0", 4)
    assert [tensor["name"] for tensor in row["tensors"]] == [
        "activations/1/model.layers.0",
        "activations/1/lm_head",
        "logits/1",
        "logits/2",
    ]
    assert [one["num_different"] for one in row["rows"]] == [0, 8, 8]
    assert row["rows"][0]["kl"] == 0.0 < row["rows"][1]["kl"]


def test_provenance_that_cases_share_is_kept_once(check: dict[str, Any]) -> None:
    assert [(case["judged"], case["believed"]) for case in check["cases"]] == [(0, 0)] * 3
    assert len(check["provenance"]) == 1


def test_without_a_check_there_is_none(tmp_path: Path) -> None:
    assert load_check(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON: "),
        ("[]", "a list where an object belongs"),
        ('{"format": 99}', "format 99 where this version reads 1"),
    ],
)
def test_what_is_no_result_is_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "check.json").write_text(text)

    with pytest.raises(UsageError) as refused:
        load_check(tmp_path)

    assert str(refused.value).splitlines()[0] == "a result file cannot be read"
    assert reason in str(refused.value)
    assert f"{tmp_path.name}/check.json" in str(refused.value)
    assert refused.value.next_step == "remove it and run the verb that writes it again"


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert load(tmp_path / "bench.json") is None


def test_a_folder_that_cannot_be_written_is_told(check: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(UsageError) as refused:
        save_check(tmp_path / "file", check)

    assert str(refused.value).splitlines()[0] == "the result of the check cannot be kept"
    assert refused.value.next_step == "give --results a folder that can be written"
