"""A difference planted in the engine: its section of the report names step, module and cause, without a log being opened."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine import rope
from parity.case import Case
from parity.cli import main
from parity.engine_runner import EngineRunner
from parity.gate import check
from parity.golden import Golden, golden_path
from parity.matrix import placed_cases
from parity.models.fetch import ensure_snapshot
from parity.platform_key import platform_key
from parity.provenance import Provenance
from parity.reporting.facts import facts, read_results
from parity.reporting.page import html, markdown
from parity.reporting.results import check_result, save_check
from parity.snapshot import Snapshot
from parity.trace import Trace
from parity.verbs import explain as verb

NAME = "llama-tiny/f32/fp/forced/p40-taps-tail-split"


@dataclass(kw_only=True)
class Planted:
    """The engine with a base of its rotation that is off by a thousandth."""

    monkeypatch: pytest.MonkeyPatch
    name: str = "engine"
    engine: EngineRunner = field(default_factory=EngineRunner)

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        right = rope.llama3_periods

        def wrong(width: int, *, base: float, scaling: Any) -> Any:
            return right(width, base=base * 1.001, scaling=scaling)

        with self.monkeypatch.context() as planted:
            planted.setattr(rope, "llama3_periods", wrong)
            return self.engine.run(case, snapshot)

    def provenance(self) -> Provenance:
        return self.engine.provenance()


@pytest.fixture
def folder(tmp_path: Path, results_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of check and explain of the planted engine; the golden is a trace of the unplanted one, in a temporary folder."""
    (case, place), *_ = [pair for pair in placed_cases() if pair[0].name == NAME]
    snapshot = ensure_snapshot("llama-tiny")
    believed = EngineRunner(name="mlx-lm 0.0")
    golden = Golden.of(
        case,
        believed.run(case, snapshot),
        snapshot_files=snapshot.logit_files,
        provenance=believed.provenance(),
        history=(),
    )
    golden.save(golden_path(case, version="0.0", root=tmp_path / "goldens"))
    planted = Planted(monkeypatch=monkeypatch)
    verdicts = check(
        (case,),
        lambda: planted,
        find_snapshot=lambda _: snapshot,
        every_name={NAME},
        root=tmp_path / "goldens",
        platform=platform_key(),
    )
    save_check(results_folder, check_result(verdicts, pattern=NAME, left_out=None, places={NAME: place}))
    sides = verb.Sides(snapshot=snapshot, expected=believed, actual=planted, recorded_with="")
    monkeypatch.setattr(verb, "sides_of", lambda _: sides)
    assert main(["explain", NAME, "--no-reproducer"]) == 1
    return results_folder


def test_step_module_and_cause_are_in_its_section_of_page_and_markdown(folder: Path) -> None:
    shown = facts(read_results(folder))
    article = re.search(r'<article class="difference".*?</article>', html(shown), flags=re.DOTALL)
    assert article is not None
    text = " ".join(re.sub(r"<[^>]+>", " ", re.sub(r"<svg.*?</svg>", "", article[0], flags=re.DOTALL)).split())

    assert f"✗ DIFFERENT {NAME}" in text
    assert "first step 0 of 4" in text
    assert "earliest module model.layers.0.self_attn.o_proj" in text
    assert "cause logic (" in text
    assert "engine" in text[text.index("cause logic (") :]
    lines = markdown(shown).splitlines()
    assert "| first step | 0 of 4 |" in lines
    assert r"| earliest module | model.layers.0.self\_attn.o\_proj |" in lines
    assert any(line.startswith("| cause | logic (") for line in lines)
