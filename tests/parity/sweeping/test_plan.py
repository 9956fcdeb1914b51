import importlib.util
from pathlib import Path

import pytest

from parity.sweeping.plan import PACKED, PLAIN, WEIGHTS, ask, ask_functions, functions, names

spec = importlib.util.spec_from_file_location("toy_subject", Path(__file__).with_name("toy_subject.py"))
assert spec is not None
assert spec.loader is not None
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)

CAUGHT = {  # invariance to the fault that only it and its like can see
    "one-by-one": "memory",
    "in-pieces": "pieces",
    "without-cache": "uncached",
    "compiled-or-not": "compiled",
    "batch-equal-lengths": "neighbours",
    "batch-left-padding": "left",
    "batch-right-padding": "right",
    "loop-any-piece": "piece",
    "loop-speculative": "draft",
    "loop-batched": "together",
    "loop-penalty": "penalty",
    "loop-prompt-cache": "prompt-cache",
    "loop-prompt-repeated": "prompt-cache",
    "same-call-twice": "memory",
    "order-of-requests": "memory",
    "fork-is-fresh": "fork",
    "stored-and-read": "stored",
    "stored-while-decoding": "stored",
    "trimmed-and-fed-again": "trim",
    "batch-merged": "merge",
    "batch-filtered": "filter",
    "batch-joined": "join",
    "batch-joined-to-empty": "neighbours",
    "batch-extracted": "extract",
    "batch-stored": "stored",
    "sanitised-twice": "sanitised-twice",
    "spare-head": "spare-head",
}


def test_every_invariance_has_a_planted_fault() -> None:
    assert set(CAUGHT) == {*PLAIN, *PACKED, *WEIGHTS}


@pytest.mark.parametrize(("kv", "name"), [(kv, name) for kv in ("fp", "kv8-g64") for name in names(kv)])
def test_an_equality_holds_of_a_subject_without_faults(kv: str, name: str) -> None:
    assert ask(toy.ToySubject(), name, kv).kind == "equal"


@pytest.mark.parametrize(("name", "fault"), CAUGHT.items())
def test_a_planted_fault_is_seen(name: str, fault: str) -> None:
    outcome = ask(toy.ToySubject(faults=frozenset({fault})), name, "fp")

    assert outcome.verdict == "different"
    assert outcome.where


@pytest.mark.parametrize("name", functions())
def test_an_equality_of_functions_holds_and_its_fault_is_seen(name: str) -> None:
    fault = "mask" if "attention" in name else "filter-rows" if name.endswith("alone") else "filter-order"

    assert ask_functions(toy.ToySubject(), name, "f32").kind == "equal"
    assert ask_functions(toy.ToySubject(faults=frozenset({fault})), name, "f32").verdict == "different"


def test_a_refusal_is_told_with_its_reason_and_is_no_difference() -> None:
    outcome = ask(toy.ToySubject(faults=frozenset({"untrimmable"})), "trimmed-and-fed-again", "fp")

    assert (outcome.verdict, outcome.detail) == ("refused", "a ring that has turned")


def test_an_exception_is_a_difference_told_in_one_line() -> None:
    outcome = ask(toy.ToySubject(faults=frozenset({"stored"})), "stored-and-read", "fp")

    assert (outcome.kind, outcome.detail) == ("raises", "OSError: disk full")


def test_packed_rows_leave_out_what_packing_changes_by_design() -> None:
    assert set(names("kv8-g64")) == set(PACKED)
    assert "in-pieces" not in names("kv8-g64")
