"""Verdicts for reports: one identical, one that differs from its second step on, with a token text that is markup."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parity.case import KV, Case
from parity.golden import Golden
from parity.golden_view import GoldenView
from parity.judge import judge
from parity.matrix import Place
from parity.provenance import Provenance
from parity.reporting.facts import Results, facts
from parity.reporting.golden_facts import golden_facts
from parity.reporting.results import check_result
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import Trace
from parity.verdict import Verdict

MODULES = ("model.layers.0.self_attn.o_proj", "model.layers.0", "lm_head")
DIFFERENT = "toy/f32/kv8-g64/greedy/p3-whole"
MARKUP = "<script>alert(1)</script>"
FAULTS = [
    {"fault": "eps-2x", "kind": "norm", "fate": "HOLE", "localised": False, "false_alarm": False, "found": None},
    {"fault": "eps-9x", "kind": "norm", "fate": "CAUGHT", "localised": True, "false_alarm": False, "found": "norm"},
    {"fault": "base", "kind": "rope", "fate": "CAUGHT", "localised": False, "false_alarm": False, "found": "o_proj"},
]
ASKED = [
    {"subject": "engine", "model": "toy", "invariance": "in-pieces", "verdict": "equal", "bound": 0.25},
    {"subject": "engine", "model": "boy", "invariance": "in-pieces", "verdict": "refused", "bound": None},
    {"subject": "mlx-lm", "model": "toy", "invariance": "in-pieces", "verdict": "equal", "bound": None},
]
EXPLAINED = {
    "case": DIFFERENT,
    "first_step": 1,
    "cause": "logic",
    "evidence": "0.25 of the row is off",
    "operation": "rms_norm",
    "element": [0, 3],
    "reproducer": "/somewhere/on/this/machine",
}


@pytest.fixture
def verdicts(
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
    make_provenance: Callable[..., Provenance],
) -> tuple[Verdict, ...]:
    def judged(case: Case, change: Callable[[Trace], Trace]) -> Verdict:
        trace = make_trace(case, modules=MODULES)
        golden = make_golden(case, trace, make_snapshot())
        verdict = judge(case, golden, change(trace), snapshot=make_snapshot(), provenance=make_provenance())
        return replace(verdict, judged=make_provenance(), believed=golden.provenance)

    def change(trace: Trace) -> Trace:
        changed = dict(trace.tensors)
        for name in ("activations/1/model.layers.0", "activations/1/lm_head", "logits/1", "logits/2"):
            values = changed[name].values().astype("<f4")
            values[..., ::2] *= 1.25
            changed[name] = Tensor.of(values)
        return replace(trace, tensors=changed)

    return (
        judged(make_case(), lambda trace: trace),
        judged(make_case(DIFFERENT, kv=KV(bits=8)), change),
        replace(judged(make_case("toy/f32/fp/greedy/other"), lambda trace: trace), model_type="qwen3"),
    )


@pytest.fixture
def check(verdicts: tuple[Verdict, ...]) -> dict[str, Any]:
    places = {DIFFERENT: Place(file="toy.toml", line=7)}
    return check_result(verdicts, pattern=None, left_out="left out: 2 cases", places=places)


@pytest.fixture
def bench() -> dict[str, Any]:
    def figure(name: str, ratio: float, *, bits: bool | None) -> dict[str, Any]:
        fields = {"peer": "mlx-lm", "engine": 24.5 * ratio, "peer_value": 24.5, "unit": "tok/s", "pairs": 5}
        return {"name": name, "ratio": ratio, "low": ratio * 0.9, "high": ratio * 1.1, "bits_identical": bits, **fields}

    return {
        "machine": {"processor": "a processor", "cores": 2, "load_before": [0.25, 0.5, 0.75]},
        "figures": [figure("decode/toy/f32/p32", 3.875, bits=True), figure("load/toy/f32", 0.96, bits=None)],
    }


@pytest.fixture
def report(check: dict[str, Any], bench: dict[str, Any]) -> dict[str, Any]:
    """Facts of a report with every section."""
    history = [
        {"run": run, "name": "decode/toy/f32/p32", "peer": "mlx-lm", "ratio": r, "low": r - 0.25, "high": r + 0.25}
        for run, r in ((1, 3.5), (2, 3.75), (3, 4.0))
    ]
    results = Results(
        check=check,
        bench={"bench.json": bench},
        mutation={"total": 3, "caught": 2, "localised": 1, "false_alarms": 0, "holes": ["eps-2x"], "faults": FAULTS},
        sweep={"equal": 2, "different": 0, "refused": 1, "rows": ASKED, "new": []},
        explained={DIFFERENT: EXPLAINED},
        history=history,
    )
    return facts(results, text_of=lambda _, token: f"{MARKUP} & *{token}*|")


@pytest.fixture
def golden_page(
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
) -> dict[str, Any]:
    """Facts of a golden's page, with a tokenizer whose every token is markup."""
    case = make_case()
    view = GoldenView.of(make_golden(case, make_trace(case), make_snapshot()))
    return golden_facts(view, text_of=lambda _, token: f"{MARKUP}{token}", prompt_text=f"{MARKUP} " * 40)
