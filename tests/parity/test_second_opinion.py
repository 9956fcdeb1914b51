import numpy as np

from parity.second_opinion import NEAR, FamilyRow, Measured, PromptRow, markdown
from parity.tensor import Tensor


def row(*values: float) -> Tensor:
    return Tensor.of(np.array([values], dtype="<f4"))


FAR = Measured.of(row(1.0, 2.0, 4.0), row(1.0, 2.5, 4.0))
NEARBY = Measured.of(row(1.0, 2.0, 4.0), row(1.0, 2.0, 4.0 + 2**-21))


def test_two_rows_are_measured_in_logits_ulps_and_nats() -> None:
    assert (FAR.apart, FAR.max_ulp, FAR.top1_agrees, FAR.margin) == (0.5, 2**21, True, 2.0)
    assert FAR.kl > 0
    assert NEARBY.max_ulp == 1


def test_rounding_agrees_and_logic_does_not() -> None:
    assert NEARBY.agrees
    assert not FAR.agrees
    just = Measured.of(row(0.0, 2.0), row(0.0, 2.0 + 2 * NEAR))
    assert not just.agrees


def test_a_known_fact_is_named_only_where_taking_it_away_helps() -> None:
    fact = FamilyRow(config="mistral", measured=FAR, neutral=NEARBY).verdict
    assert fact == "differs: mistral_sliding_window; with sliding_window=None on the second side 4.8e-07 apart: agrees"
    assert FamilyRow(config="mistral", measured=FAR, neutral=FAR).verdict == "differs, not explained"
    assert FamilyRow(config="gemma3_text", measured=FAR).verdict == (
        "differs: gemma3_embedding_scale, which no config key takes away"
    )
    assert FamilyRow(config="llama", measured=FAR).verdict == "differs, not explained"
    assert FamilyRow(config="llama", measured=NEARBY).verdict == "agrees"
    assert FamilyRow(config="minicpm", refused="ValueError: unknown").verdict == "not compared: ValueError: unknown"


def test_the_report_has_a_line_a_row() -> None:
    prompt = PromptRow(prompt="capital", step=3, measured=NEARBY, second_off=1e-5, engine_off=2e-5, bound=3e-5)
    lines = markdown("transformers 5", [prompt], [FamilyRow(config="llama", measured=NEARBY)]).splitlines()
    assert "| capital | 3 | 4.8e-07 | 1 | 0.0e+00 | agrees | 2 | 1.0e-05 | 2.0e-05 | 3.0e-05 |" in [
        line.replace(f"| {NEARBY.kl:.1e} |", "| 0.0e+00 |") for line in lines
    ]
    assert lines[-1] == f"| llama | 4.8e-07 | 1.2 | {NEARBY.kl:.1e} | agrees |"
