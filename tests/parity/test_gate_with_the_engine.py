"""Faults planted in the engine: the gate sees each of them, and says where it begins.

The goldens here are traces of the unplanted engine in a temporary folder: what is proved is that the gate notices a change,
not that the engine is right. The committed goldens, which oracles alone write, prove that.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import norm, rope
from parity.case import Case
from parity.engine_runner import EngineRunner
from parity.gate import check
from parity.golden import Golden, golden_path
from parity.matrix import load_cases, select
from parity.models.fetch import ensure_snapshot
from parity.platform_key import platform_key
from parity.verdict import Verdict

NAME = "llama-tiny/f32/fp/forced/p40-taps-tail-split"


@pytest.fixture
def case() -> Case:
    (found,) = select(load_cases(), NAME)
    return found


@pytest.fixture
def judged(case: Case, tmp_path: Path) -> Callable[[], Verdict]:
    """Keep today's trace as the golden, and judge whatever the engine says later."""
    snapshot = ensure_snapshot("llama-tiny")
    runner = EngineRunner(kernels=None)
    trace, provenance = runner.run(case, snapshot), runner.provenance()
    golden = Golden.of(case, trace, snapshot_files=snapshot.logit_files, provenance=provenance, history=())
    golden.save(golden_path(case, version="0.0", root=tmp_path / "goldens"))

    def judged() -> Verdict:
        (verdict,) = check(
            (case,),
            lambda: EngineRunner(kernels=None),
            find_snapshot=lambda _: snapshot,
            every_name={NAME},
            root=tmp_path / "goldens",
            platform=platform_key(),
        )
        return verdict

    return judged


def test_the_unplanted_engine_is_identical_to_itself(judged: Callable[[], Verdict]) -> None:
    assert judged().status.value == "IDENTICAL"


def test_a_rope_base_that_is_off_by_a_thousandth_is_found_in_the_first_attention(
    judged: Callable[[], Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rope.llama3_periods

    def wrong(width: int, *, base: float, scaling: Any) -> Any:
        return right(width, base=base * 1.001, scaling=scaling)

    monkeypatch.setattr(rope, "llama3_periods", wrong)
    verdict = judged()

    assert (verdict.status.value, verdict.first_step, verdict.earliest) == (
        "DIFFERENT",
        0,
        "model.layers.0.self_attn.o_proj",
    )


def test_a_norm_whose_epsilon_is_off_is_found_in_the_first_norm(
    judged: Callable[[], Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = norm.RMSNorm.__call__

    def wrong(self: norm.RMSNorm, x: Any) -> Any:
        return right(replace(self, eps=self.eps * 2) if self.path.endswith("input_layernorm") else self, x)

    monkeypatch.setattr(norm.RMSNorm, "__call__", wrong)

    assert judged().earliest == "model.layers.0.input_layernorm"


def test_one_bit_of_one_weight_makes_the_golden_stale(
    judged: Callable[[], Verdict], case: Case, tmp_path: Path
) -> None:
    del judged  # the golden is on disk
    snapshot = ensure_snapshot("llama-tiny")
    weights = bytearray((snapshot.path / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (snapshot.path / "model.safetensors").write_bytes(weights)
    changed = type(snapshot).read(snapshot.path)

    (verdict,) = check(
        (case,), EngineRunner, find_snapshot=lambda _: changed, every_name={NAME}, root=tmp_path / "goldens"
    )

    assert verdict.status.value == "STALE_GOLDEN"
    assert str(verdict.facts["snapshot"]).startswith("model.safetensors: golden ")
