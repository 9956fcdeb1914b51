"""Batch cases on the engine: judged against committed goldens, with faults planted where only a batch would show them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.batch_columns import Columns
from engine.cache.batch_rotating import BatchRotatingCache
from parity.case import Case
from parity.engine_runner import EngineRunner
from parity.errors import CaseError
from parity.golden import GOLDENS, Golden, golden_path
from parity.judge import judge
from parity.matrix import load_cases, select
from parity.models.fetch import ensure_snapshot
from parity.platform_key import platform_key
from parity.verdict import Status, Verdict

VERSION = "0.32.2"
JUDGED = (
    "llama_sliding-tiny/f32/fp/forced/batch-joining-right-tail-split",
    "llama_sliding-tiny/f32/fp/greedy/batch-joining-right-chunk7",
    "llama-tiny/f32/fp/forced/batch-joining-merged-tail-split",
    "lfm2-tiny/f32/fp/forced/batch-uneven-left-chunk7",
    "qwen3_5-tiny/f32/fp/forced/batch-uneven-right-chunk7",
)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.name: case for case in load_cases()}


@pytest.fixture
def verdict(cases: dict[str, Case]) -> Callable[[str], Verdict]:
    if not (GOLDENS / f"mlx-lm-{VERSION}" / platform_key()).is_dir():
        pytest.fail("this platform has no committed goldens: make goldens")

    def judged(name: str) -> Verdict:
        case, runner = cases[name], EngineRunner(kernels=None)
        snapshot = ensure_snapshot(case.snapshot)
        golden = Golden.load(golden_path(case, version=VERSION))
        return judge(case, golden, runner.run(case, snapshot), snapshot=snapshot, provenance=runner.provenance())

    return judged


@pytest.mark.parametrize("name", JUDGED)
def test_the_engines_batches_are_bit_identical_to_the_oracles(verdict: Callable[[str], Verdict], name: str) -> None:
    found = verdict(name)
    assert found.status == Status.IDENTICAL, found.facts


def test_a_position_off_by_one_in_one_row_is_told_with_its_sequence(
    verdict: Callable[[str], Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Columns.row_offsets.fget  # type: ignore[attr-defined]

    def late(self: Columns) -> tuple[int, ...]:
        return tuple(offset + (row == 1) for row, offset in enumerate(right(self)))

    monkeypatch.setattr(Columns, "row_offsets", property(late))
    found = verdict("llama-tiny/f32/fp/forced/batch-uneven-left-whole")
    assert found.status == Status.DIFFERENT
    assert found.facts["sequence"] == "1 of 3, its step 0"


def no_padding(self: Columns, L: int, **_: object) -> mx.array:
    every = mx.arange(self.used, self.used + L)[:, None] >= mx.arange(self.used + L)
    return mx.broadcast_to(every, (self.rows, 1, *every.shape))


def one_less(right: Callable[..., Any]) -> Callable[..., Any]:
    def mask(self: BatchRotatingCache, L: int, *, window: int | None = None, as_array: bool = False) -> Any:
        return right(self, L, window=(window or self.max_size) - 1, as_array=as_array)

    return mask


def not_rolled(array: mx.array, _shifts: Sequence[int]) -> mx.array:
    return array


@pytest.mark.parametrize(
    ("target", "fault", "name"),
    [
        ("engine.cache.batch_columns.Columns.mask", no_padding, "llama-tiny/f32/fp/forced/batch-uneven-left-whole"),
        (
            "engine.cache.batch_rotating.BatchRotatingCache.mask",
            one_less(BatchRotatingCache.mask),
            "gemma3_text-tiny/f32/fp/forced/batch-short-right-tail-split",
        ),
        (
            "engine.cache.batch_rotating.rolled",
            not_rolled,
            "llama_sliding-tiny/f32/fp/forced/batch-uneven-right-chunk7",
        ),
        ("engine.cache.batch_plain.rolled", not_rolled, "qwen3-tiny/f32/fp/forced/batch-uneven-right-tail-split"),
        (
            "engine.cache.recurrent.RecurrentCache.ends",
            lambda *_: None,
            "lfm2-tiny/f32/fp/forced/batch-uneven-right-tail-split",
        ),
        (
            "engine.cache.recurrent.RecurrentCache.mask",
            lambda *_: None,
            "qwen3_5-tiny/f32/fp/forced/batch-uneven-left-whole",
        ),
    ],
)
def test_a_planted_fault_of_batches_is_seen(
    verdict: Callable[[str], Verdict], monkeypatch: pytest.MonkeyPatch, target: str, fault: Any, name: str
) -> None:
    monkeypatch.setattr(target, fault)
    assert verdict(name).status == Status.DIFFERENT


def test_another_sampler_is_refused(cases: dict[str, Case]) -> None:
    case = replace(cases[JUDGED[0]], sampler="warm")
    with pytest.raises(CaseError) as caught:
        EngineRunner(kernels=None).run(case, ensure_snapshot(case.snapshot))
    assert str(caught.value) == (
        f"the engine has no sampler 'warm'\n  case   {case.name}\n  known  greedy\n  next   use greedy"
    )


def test_the_matrix_has_cases_of_every_fill(cases: dict[str, Case]) -> None:
    batches = [case.batch for case in select(cases.values(), "*/batch-*") if case.batch is not None]
    assert {batch.fill for batch in batches} == {"left", "right", "merged"}
    assert any(max(batch.joins) > 0 for batch in batches)
