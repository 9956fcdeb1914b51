import json
from pathlib import Path
from typing import Any

import pytest

from parity.errors import UsageError
from parity.reporting.facts import Results, facts, kv_kind, read_results
from parity.reporting.results import save_check

DIFFERENT = "toy/f32/kv8-g64/greedy/p3-whole"


def test_the_overview_counts_what_the_check_found(report: dict[str, Any]) -> None:
    assert report["overview"] == {
        "pattern": None,
        "left_out": "left out: 2 cases",
        "num_cases": 3,
        "num_passing": 2,
        "counts": [{"status": "IDENTICAL", "cases": 2}, {"status": "DIFFERENT", "cases": 1}],
        "oracles": ["mlx-lm"],
    }


def test_the_grid_has_a_cell_for_each_family_and_mode_and_leads_to_the_difference(report: dict[str, Any]) -> None:
    llama, qwen3 = report["grid"]["rows"]

    assert report["grid"]["kv"] == ["fp", "kvB-gG"]
    assert llama == {
        "family": "llama",
        "cells": [
            [{"dtype": "f32", "cases": 1, "passing": 1, "difference": None}],
            [{"dtype": "f32", "cases": 1, "passing": 0, "difference": 0}],
        ],
    }
    assert qwen3["cells"][1] == [], "a family without a mode has an empty cell"


def test_a_difference_names_step_module_and_cause(report: dict[str, Any]) -> None:
    (one,) = report["differences"]

    assert (one["case"], one["first_step"], one["earliest"]) == (DIFFERENT, 1, "model.layers.0")
    assert one["cause"] == "logic (0.25 of the row is off)", "from what assay explain left"
    assert one["explained"]["operation"] == "rms_norm"
    assert [module["module"] for module in one["modules"]] == ["model.layers.0", "lm_head"]
    assert one["first_tensor"]["name"] == "logits/1"
    assert one["first_tensor"]["ulp_histogram"], "what the histogram draws"
    assert one["place"] == {"file": "parity/cases/toy.toml", "line": 7}


def test_the_top_before_and_after_is_that_of_the_first_differing_row(report: dict[str, Any]) -> None:
    top = report["differences"][0]["top"]

    assert top["step"] == 1
    assert len(top["ranks"]) == 10
    assert all(rank["expected"]["logprob"] <= 0 for rank in top["ranks"])
    assert [r["expected"]["id"] for r in top["ranks"]] != [r["actual"]["id"] for r in top["ranks"]]


def test_an_explanation_of_another_difference_is_not_shown_as_one_of_this(check: dict[str, Any]) -> None:
    old = {"case": DIFFERENT, "first_step": 2, "cause": "tie", "earliest": "lm_head"}

    (one,) = facts(Results(check=check, explained={DIFFERENT: old}))["differences"]

    assert (one["cause"], one["explained"]) == (None, None)


def test_no_path_of_the_machine_is_in_the_report(report: dict[str, Any]) -> None:
    assert "/somewhere" not in json.dumps(report)


def test_faults_and_equalities_are_counted_by_kind(report: dict[str, Any]) -> None:
    assert report["mutation"]["tally"] == [
        {"kind": "norm", "all": 2, "caught": 1, "localised": 1, "false alarms": 0},
        {"kind": "rope", "all": 1, "caught": 1, "localised": 0, "false alarms": 0},
    ]
    assert report["sweep"]["tally"] == [
        {"subject": "engine", "invariance": "in-pieces", "all": 2, "equal": 1, "different": 0, "refused": 1},
        {"subject": "mlx-lm", "invariance": "in-pieces", "all": 1, "equal": 1, "different": 0, "refused": 0},
    ]


def test_all_of_it_is_plain_json(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_bench_alone_is_a_report(bench: dict[str, Any]) -> None:
    alone = facts(Results(bench={"bench.json": bench}))

    assert alone["overview"] is None
    assert alone["differences"] == []
    (one,) = alone["bench"]
    assert one == {"file": "bench.json", "figures": bench["figures"], "machine": bench["machine"], "others": {}}


def test_a_bench_of_another_kind_is_shown_as_far_as_it_is_known() -> None:
    gate = {"figures": [{"name": "gate", "ratio": 8.5}], "wall": {"fast": 20.5}}

    (one,) = facts(Results(bench={"bench-gate.json": gate}))["bench"]

    assert (one["figures"][0]["ratio"], one["figures"][0]["peer"], one["others"]) == (
        8.5,
        None,
        {"wall": {"fast": 20.5}},
    )


def test_results_are_found_by_name(check: dict[str, Any], bench: dict[str, Any], tmp_path: Path) -> None:
    save_check(tmp_path, check)
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    (tmp_path / "bench-samplers.json").write_text(json.dumps(bench))
    (tmp_path / "mutation.json").write_text('{"total": 1}')
    (tmp_path / "sweep.json").write_text('{"equal": 1}')
    (tmp_path / "explain/toy/f32").mkdir(parents=True)
    (tmp_path / "explain/toy/f32/x.json").write_text(json.dumps({"case": DIFFERENT, "cause": "tie"}))

    found = read_results(tmp_path)

    assert found.check == check
    assert list(found.bench) == ["bench-samplers.json", "bench.json"]
    assert (found.mutation, found.sweep) == ({"total": 1}, {"equal": 1})
    assert found.explained == {DIFFERENT: {"case": DIFFERENT, "cause": "tie"}}


def test_an_empty_folder_is_refused_with_the_verb_that_fills_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read_results(tmp_path)

    assert str(refused.value).splitlines()[0] == "there is nothing to report on"
    assert refused.value.next_step == f"assay check --results {tmp_path}"


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("fp", "fp"),
        ("kv8-g64", "kvB-gG"),
        ("kv4-g32-s16", "kvB-gG-sN"),
        ("kv8-g32-after-prompt", "kvB-gG-after-prompt"),
        ("config-8g32@1-4g32@2", "config"),
        (None, "-"),
    ],
)
def test_the_grid_writes_sizes_as_letters(mode: str | None, kind: str) -> None:
    assert kv_kind(mode) == kind
