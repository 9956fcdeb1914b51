import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity import row_store
from parity.case import Case
from parity.cli import main
from parity.golden import Golden
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import Trace


@pytest.fixture
def trace(make_case: Callable[..., Case], make_trace: Callable[..., Trace]) -> Trace:
    return make_trace(make_case())


@pytest.fixture
def changed(trace: Trace, flip: Callable[..., Tensor]) -> Trace:
    return replace(trace, tensors={**trace.tensors, "logits/1": flip(trace.tensors["logits/1"], 4, 1)})


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def diff(*line: object) -> tuple[int, str]:
        code = main(["diff", *map(str, line)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return diff


def write_foreign(folder: Path, trace: Trace, rows: int = 3) -> Path:
    folder.mkdir()
    described = {
        "model": "org/toy",
        "greedy_ids": list(trace.token_ids),
        "logit_steps": 3,
        "vocab_size": trace.logits(0).shape[-1],
    }
    (folder / "toy-parity.json").write_text(json.dumps(described))
    for step in range(rows):
        (folder / f"toy-logits-step{step}.bin").write_bytes(trace.logits(step).values().astype("<f4").tobytes())
    return folder


def test_equal_traces_exit_with_0(diff: Any, trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a")
    trace.save(tmp_path / "b")

    code, out = diff(tmp_path / "a", tmp_path / "b")

    assert code == 0
    assert out.splitlines() == [
        "expected  trace a",
        "actual    trace b",
        "tensor     match      different  max ULP  KL  top-1   flips",
        "logits/0   IDENTICAL  0 of 16    -        0   agrees  0 of 10",
        "logits/1   IDENTICAL  0 of 16    -        0   agrees  0 of 10",
        "logits/2   IDENTICAL  0 of 16    -        0   agrees  0 of 10",
        "token_ids  IDENTICAL  0 of 3     -        -   -       -",
        "bit-identical",
    ]


def test_one_flipped_bit_exits_with_1_and_is_placed(diff: Any, trace: Trace, changed: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a")
    changed.save(tmp_path / "b")

    code, out = diff(tmp_path / "a", tmp_path / "b")

    assert code == 1
    assert "logits/1   DIFFERENT  1 of 16    2" in out
    assert "first     logits/1 [0, 4]: expected 0x" in out
    assert out.splitlines()[-1] == "not bit-identical"


def test_a_golden_is_compared_with_a_trace(  # noqa: PLR0917 - fixtures
    diff: Any,
    trace: Trace,
    changed: Trace,
    make_case: Callable[..., Case],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
    tmp_path: Path,
) -> None:
    make_golden(make_case(), trace, make_snapshot()).save(tmp_path / "g.json")
    changed.save(tmp_path / "b")

    assert diff(tmp_path / "g.json", tmp_path / "b")[0] == 1
    assert diff(tmp_path / "g.json", tmp_path / "g.json")[0] == 0


def test_a_sketched_golden_is_compared_by_digest_and_in_full_where_rows_are_stored(  # noqa: PLR0917 - fixtures
    diff: Any,
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
    flip: Callable[..., Tensor],
    tmp_path: Path,
) -> None:
    trace = make_trace(make_case(), vocabulary=2000)
    changed = replace(trace, tensors={**trace.tensors, "logits/2": flip(trace.tensors["logits/2"])})
    make_golden(make_case(), trace, make_snapshot()).save(tmp_path / "g.json")
    changed.save(tmp_path / "b")

    code, out = diff(tmp_path / "g.json", tmp_path / "b")
    assert code == 1
    assert "logits/2   DIFFERENT  -" in out

    row_store.save(make_case(), "0.32.2", trace.tensors)
    code, out = diff(tmp_path / "g.json", tmp_path / "b")
    assert code == 1
    assert "logits/2   DIFFERENT  1 of 2000" in out


def test_json_has_a_row_a_tensor(diff: Any, trace: Trace, changed: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a")
    changed.save(tmp_path / "b")

    code, out = diff("--json", tmp_path / "a", tmp_path / "b")

    described = json.loads(out)
    assert (code, described["identical"]) == (1, False)
    assert [row["match"] for row in described["rows"]] == ["IDENTICAL", "DIFFERENT", "IDENTICAL", "IDENTICAL"]
    assert (described["rows"][1]["first"], described["rows"][1]["max_ulp"]) == ([0, 4], 2)


def test_missing_and_extra_tensors_are_a_difference(diff: Any, trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a")
    less = {name: tensor for name, tensor in trace.tensors.items() if name != "logits/2"}
    Trace(tensors=less).save(tmp_path / "b")

    assert "missing   logits/2" in diff(tmp_path / "a", tmp_path / "b")[1]
    code, out = diff(tmp_path / "b", tmp_path / "a")
    assert code == 1
    assert "extra     logits/2" in out


def test_another_shape_is_incomparable(diff: Any, trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a")
    other = Tensor.of(np.zeros((1, 17), dtype="<f4"))
    replace(trace, tensors={**trace.tensors, "logits/0": other}).save(tmp_path / "b")

    code, out = diff(tmp_path / "a", tmp_path / "b")

    assert code == 1
    assert "first     logits/0: expected F32[1, 16], actual F32[1, 17]" in out


def test_a_foreign_golden_is_compared_with_a_trace(diff: Any, trace: Trace, changed: Trace, tmp_path: Path) -> None:
    foreign = write_foreign(tmp_path / "f", trace)
    trace.save(tmp_path / "a")
    changed.save(tmp_path / "b")

    code, out = diff(foreign, tmp_path / "a")
    assert code == 0
    assert out.startswith("expected  foreign golden toy of org/toy, 3 of 3 rows on disk\n")
    assert diff(foreign / "toy-parity.json", tmp_path / "b")[0] == 1


def test_a_bfloat16_trace_is_widened_before_it_meets_a_foreign_golden(diff: Any, trace: Trace, tmp_path: Path) -> None:
    halves = {
        name: Tensor.of((tensor.bits() >> np.uint32(16)).astype("<u2"), dtype="BF16")
        for name, tensor in trace.tensors.items()
        if name.startswith("logits/")
    }
    ids = trace.tensors["token_ids"]
    rounded = Trace(tensors={**halves, "token_ids": ids})
    rounded.save(tmp_path / "a")

    assert diff(write_foreign(tmp_path / "f", rounded), tmp_path / "a")[0] == 0


def test_other_token_ids_of_a_foreign_golden_are_a_difference(diff: Any, trace: Trace, tmp_path: Path) -> None:
    foreign = write_foreign(tmp_path / "f", trace)
    ids = np.array(trace.token_ids, dtype="<i4")
    ids[1] += 1
    replace(trace, tensors={**trace.tensors, "token_ids": Tensor.of(ids)}).save(tmp_path / "a")

    code, out = diff(foreign, tmp_path / "a")

    assert code == 1
    assert f"token ids part at step 1: expected {trace.token_ids[1]}, actual {ids[1]}" in out


def test_rows_that_a_foreign_golden_lacks_are_not_passed_over(diff: Any, trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a")

    code, out = diff(write_foreign(tmp_path / "f", trace, rows=2), tmp_path / "a")

    assert code == 1
    assert "2 of 3 rows on disk" in out
    assert "extra     logits/2" in out

    code, out = diff(tmp_path / "f", tmp_path / "f")
    assert (code, out.splitlines()[-1]) == (0, "bit-identical as far as rows are on disk; 1 are not")


def test_nothing_comparable_is_the_caller_s_error(diff: Any, tmp_path: Path) -> None:
    code, out = diff(tmp_path / "gone", tmp_path)

    assert code == 2
    assert "is nothing that can be compared\n  known  a folder with trace.json" in out


def test_a_rotten_golden_is_not_compared(diff: Any, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text("{}")

    code, out = diff(tmp_path / "g.json", tmp_path / "g.json")

    assert code == 2
    assert out.startswith("a golden on disk cannot be believed")
