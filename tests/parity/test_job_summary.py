from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parity.case import Case
from parity.job_summary import append, job_summary
from parity.verdict import Status, Verdict


@pytest.fixture
def verdict(make_case: Callable[..., Case]) -> Callable[..., Verdict]:
    def make(status: Status, name: str = "toy/f32/x", **fields: Any) -> Verdict:
        return Verdict(name=name, case=make_case(name), status=status, model_type="llama", what="it parts", **fields)

    return make


def test_all_well_is_one_heading_and_the_table(verdict: Callable[..., Verdict]) -> None:
    assert job_summary((verdict(Status.IDENTICAL),), left_out="left out: 2 cases").splitlines() == [
        "## ✓ assay check: 1 case: 1 IDENTICAL",
        "",
        "left out: 2 cases",
        "",
        "| model | snapshot | dtype | KV modes | identical | other |",
        "| --- | --- | --- | --- | --- | --- |",
        "| llama | toy | f32 | fp | 1 | - |",
    ]


def test_what_does_not_pass_is_told_in_full(verdict: Callable[..., Verdict]) -> None:
    bad = verdict(Status.DIFFERENT, first_step=1, facts={"step": "1 of 3"}, earliest="model.layers.0", next_step="look")

    lines = job_summary((bad, verdict(Status.IDENTICAL, "toy/f32/y"))).splitlines()

    assert lines[0] == "## ✗ assay check: 2 cases: 1 IDENTICAL, 1 DIFFERENT"
    assert lines[2] == "**DIFFERENT** toy/f32/x"
    assert lines[4:10] == [
        "```",
        "it parts",
        "  step      1 of 3",
        "  earliest  model.layers.0",
        "  next      look",
        "```",
    ]


def test_nothing_judged_is_not_all_well() -> None:
    assert job_summary(()).startswith("## ✗ assay check: 0 cases: nothing was judged")


def test_a_message_cannot_leave_its_block_nor_a_name_its_cell(verdict: Callable[..., Verdict]) -> None:
    bad = verdict(Status.ERROR, "a|b`<img>*", facts={"reason": "```\n<script>alert(1)</script>\n````"})

    lines = job_summary((bad,)).splitlines()

    assert lines[2] == "**ERROR** a\\|b\\`&lt;img>\\*"
    assert lines.count("`````") == 2, "the fence is longer than any run of ticks within"


def test_as_many_messages_as_fit_the_others_counted(verdict: Callable[..., Verdict]) -> None:
    many = tuple(verdict(Status.ERROR, f"toy/f32/{n}") for n in range(53))
    long = tuple(verdict(Status.ERROR, f"toy/f32/{n}", facts={"reason": "x" * 300_000}) for n in range(3))

    assert "and 3 more that do not pass: they are in the log" in job_summary(many)
    assert "and 2 more that do not pass" in job_summary(long)
    assert len(job_summary(long).encode()) < 2**20


def test_summaries_of_several_steps_stand_one_after_another(tmp_path: Path) -> None:
    append(tmp_path / "summary", "one\n")
    append(tmp_path / "summary", "two\n")

    assert (tmp_path / "summary").read_text() == "one\ntwo\n"
