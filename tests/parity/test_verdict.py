import json
from collections.abc import Callable

import pytest

from parity.case import Case
from parity.verdict import PASSING, Status, Verdict, counts

NAME = "qwen3-tiny/f32/fp/greedy/p17"


def test_the_message_of_a_difference_to_the_letter() -> None:
    verdict = Verdict(
        name=NAME,
        status=Status.DIFFERENT,
        what=f"logits of {NAME} are not bit-identical to mlx-lm 0.32.2",
        facts={
            "step": "3 of 8",
            "first": "[0, 41]: expected 0x3f9d0000 (1.2265625), actual 0x3f9d0001 (1.2265626), 1 ULP",
            "count": "12 of 512 elements, at most 2 ULP; top-1 agrees, margin 0.84",
        },
        earliest="model.layers.1.self_attn.o_proj",
        cause="rounding (float64 re-score: oracle 3e-8 off, engine 4e-8 off)",
        next_step=f"assay explain {NAME}",
    )

    assert verdict.message() == (
        "logits of qwen3-tiny/f32/fp/greedy/p17 are not bit-identical to mlx-lm 0.32.2\n"
        "  step      3 of 8\n"
        "  first     [0, 41]: expected 0x3f9d0000 (1.2265625), actual 0x3f9d0001 (1.2265626), 1 ULP\n"
        "  count     12 of 512 elements, at most 2 ULP; top-1 agrees, margin 0.84\n"
        "  earliest  model.layers.1.self_attn.o_proj\n"
        "  cause     rounding (float64 re-score: oracle 3e-8 off, engine 4e-8 off)\n"
        "  next      assay explain qwen3-tiny/f32/fp/greedy/p17"
    )


def test_what_is_not_known_takes_no_line() -> None:
    assert Verdict(name="x", status=Status.IDENTICAL, what="x is bit-identical").message() == "x is bit-identical"


def test_only_three_statuses_pass() -> None:
    assert {status.value for status in PASSING} == {"IDENTICAL", "KNOWN_DEVIATION", "MEASURED_OK"}


@pytest.mark.parametrize("status", list(Status))
def test_a_status_is_named_as_it_is_written(status: Status) -> None:
    assert status.name == status.value


def test_json_has_exactly_the_promised_keys(make_case: Callable[..., Case]) -> None:
    verdict = Verdict(
        name="toy/f32/fp/greedy/p3-whole",
        status=Status.DIFFERENT,
        what="",
        case=make_case(),
        model_type="llama",
        first_step=2,
        earliest="model.norm",
    )

    assert json.loads(json.dumps(verdict.to_json())) == {
        "case": "toy/f32/fp/greedy/p3-whole",
        "status": "DIFFERENT",
        "model_type": "llama",
        "kv": "fp",
        "sampler": "greedy",
        "dtype": "f32",
        "tier": "L1",
        "oracle": "mlx-lm",
        "num_steps": 3,
        "first_step": 2,
        "earliest": "model.norm",
        "cause": None,
    }


def test_a_verdict_without_a_case_has_the_same_keys(make_case: Callable[..., Case]) -> None:
    with_case = Verdict(name="x", status=Status.ERROR, what="", case=make_case())
    without = Verdict(name="x", status=Status.ERROR, what="")

    assert set(without.to_json()) == set(with_case.to_json())
    assert without.to_json()["kv"] is None


def test_counts_name_only_what_occurs() -> None:
    verdicts = tuple(Verdict(name="x", status=s, what="") for s in (Status.ERROR, Status.IDENTICAL, Status.IDENTICAL))

    assert counts(verdicts) == {"IDENTICAL": 2, "ERROR": 1}
