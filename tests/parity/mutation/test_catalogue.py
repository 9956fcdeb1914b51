"""The catalogue is as it says: enough faults of every kind, on cases that exist, at modules that their goldens record."""

from collections import Counter
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from parity.golden import GOLDENS, Golden, golden_path
from parity.golden_folder import golden_version
from parity.matrix import load_cases
from parity.mutation import written_prompts
from parity.mutation.catalogue import FAULTS, by_name
from parity.mutation.fault import KINDS, NOT_MODULES, Fault, drawn, taps
from parity.mutation.planting import Edit, Replacement, swap
from parity.snapshot import NO_MODEL

PLATFORM = "linux-x86_64-cpu"


@cache
def cases() -> dict[str, Any]:
    return {case.name: case for case in load_cases()}


@cache
def recorded(name: str) -> frozenset[str]:
    """Module paths in the golden of a case, and the other things that can differ in it."""
    version = golden_version(cases()[name].oracle, GOLDENS, PLATFORM)
    golden = Golden.load(golden_path(cases()[name], version=version or "", platform=PLATFORM))
    heads = {entry.name.split("/", 1)[0] for entry in golden.entries} - {"activations"}
    paths = {entry.name.split("/", 2)[2] for entry in golden.entries if entry.name.startswith("activations/")}
    return frozenset(heads | paths | {"cache"})


def test_there_are_at_least_250_and_some_of_every_kind() -> None:
    kinds = Counter(fault.kind for fault in FAULTS)

    assert len(FAULTS) >= 250
    assert list(kinds) != []
    assert {kind for kind in KINDS if kinds[kind] < 5} == set()


def test_names_are_unique_and_lead_back_to_the_fault() -> None:
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []
    assert all(by_name(fault.name) is fault for fault in FAULTS)


def test_every_fault_is_asked_of_cheap_cases_that_exist_and_can_show_where_it_is() -> None:
    def wrong(fault: Fault, name: str) -> bool:
        if name.startswith(written_prompts.PREFIX):
            return fault.at not in ("tokenizer", "chat_template")
        if name not in cases():
            return True
        case = cases()[name]
        shown = fault.at in recorded(name) if case.record or case.sampling else fault.hidden
        return not case.snapshot.endswith(("-tiny", NO_MODEL.name)) or not shown

    assert [(fault.name, name) for fault in FAULTS for name in fault.cases if wrong(fault, name)] == []


def test_what_a_fault_replaces_is_there() -> None:
    def there(target: str) -> bool:
        module, _, path = target.partition(":")
        owner: Any = import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        return name in vars(owner)

    targets = [fault.plant.target for fault in FAULTS if isinstance(fault.plant, Replacement)]
    assert len(targets) > 50
    assert [target for target in targets if not there(target)] == []
    assert [fault.name for fault in FAULTS if not isinstance(fault.plant, Replacement | Edit)] == []


def test_every_fault_says_what_is_wrong_in_a_line() -> None:
    assert [f.name for f in FAULTS if f.says != f.says.strip(" .") or "\n" in f.says or len(f.says) > 100] == []


def test_at_most_one_in_twenty_is_hidden() -> None:
    assert sum(bool(fault.hidden) for fault in FAULTS) * 20 <= len(FAULTS)


@pytest.mark.parametrize(
    "changes",
    [{"kind": "typing error"}, {"name": "rope-base/llama/a"}, {"cases": ()}],
)
def test_a_fault_that_is_not_declared_in_full_is_refused(changes: dict[str, Any]) -> None:
    declared: dict[str, Any] = {
        "name": "eps/llama/a",
        "kind": "eps",
        "says": "eps is wrong",
        "at": NOT_MODULES[0],
        "cases": ("toy",),
        "plant": swap("engine.norm:swiglu", lambda right: right),
    }
    Fault(**declared)
    with pytest.raises(ValueError, match="is not as declared in KINDS, or has no cases"):
        Fault(**{**declared, **changes})


def test_names_of_cases_are_made_of_their_parts() -> None:
    assert taps("llama") == "llama-tiny/f32/fp/forced/p40-taps-tail-split"
    assert taps("llama", feed="whole") == "llama-tiny/f32/fp/forced/p40-mutation-whole"
    assert taps("llama-q4g32") == "llama-q4g32-tiny/f32/fp/forced/p40-mutation-tail-split"
    assert taps("qwen3", dtype="bf16") == "qwen3-tiny/bf16/fp/forced/p40-mutation-tail-split"
    assert drawn("t07", "flat", batch=3, seed=42) == "samplers/mlx-lm/t07-flat/f32/b3/s42"
