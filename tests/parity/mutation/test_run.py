import pickle
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import pytest

from parity.errors import AssayError, UsageError
from parity.mutation import run
from parity.mutation.catalogue import FAULTS, by_name
from parity.mutation.fault import KINDS
from parity.mutation.run import Mutation, chosen, mutate, sampled, try_named
from parity.mutation.trial import Answer, Fate, Outcome
from tests.engine.families.committed_golden import needs_goldens


@pytest.mark.parametrize("size", [1, len(KINDS), 100, 10_000])
def test_a_sample_holds_every_kind_before_any_kind_twice(size: int) -> None:
    sample = sampled(FAULTS, size)
    kinds = Counter(fault.kind for fault in sample)

    assert len(sample) == min(size, len(FAULTS))
    assert [fault for fault in FAULTS if fault in sample] == list(sample), "in the order of the catalogue"
    most = max(kinds.values())
    exhausted = Counter(fault.kind for fault in FAULTS)
    assert all(kinds[kind] >= min(most - 1, exhausted[kind]) for kind in KINDS)


def test_a_sample_is_the_same_every_time_whatever_the_order_of_the_faults() -> None:
    names = {fault.name for fault in sampled(FAULTS, 40)}

    assert {fault.name for fault in sampled(FAULTS[::-1], 40)} == names
    assert names > {fault.name for fault in sampled(FAULTS, 30)}


def test_a_pattern_chooses_by_name() -> None:
    assert {fault.kind for fault in chosen("rope-*", None)} == {
        "rope base",
        "rope offset",
        "rope scaling",
        "rope pairing",
    }
    assert len(chosen("rope-*", 3)) == 3
    assert chosen(None, None) == FAULTS


def test_an_unknown_pattern_lists_near_names() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)no fault matches 'eps/lama/norm'\n  near +eps/llama/norm\n.*next +assay mutate --list"
    ):
        chosen("eps/lama/norm", None)


@needs_goldens
def test_processes_find_what_one_finds_in_the_order_asked_for() -> None:
    faults = [by_name(name) for name in ("sampler-seed/seed/one-more", "eps/llama/norm", "sampler-seed/keys/one-more")]
    told: list[str] = []

    both = mutate(faults, jobs=2, on_outcome=lambda outcome: told.append(outcome.fault))

    assert both == mutate(faults)
    assert [outcome.fault for outcome in both.outcomes] == [fault.name for fault in faults]
    assert sorted(told) == sorted(fault.name for fault in faults)
    assert both.passes


@needs_goldens
def test_a_sample_of_the_catalogue_is_caught_without_false_alarm() -> None:
    mutation = mutate(sampled([fault for fault in FAULTS if not fault.cases[0].startswith("prompts/")], 16))

    assert mutation.passes
    assert len(mutation.caught) == 16


class Pool:
    """A pool whose workers all end in the same way."""

    def __init__(self, end: Callable[[Future[Any]], None]) -> None:
        self.end = end

    def submit(self, *_: object) -> Future[Any]:
        future: Future[Any] = Future()
        self.end(future)
        return future

    def shutdown(self, **_: object) -> None: ...


def test_an_error_reaches_the_caller_from_a_worker_word_for_word(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(FAULTS[0], cases=("toy/none",))
    monkeypatch.setattr(run, "by_name", lambda _: asked)
    refusal = pickle.loads(pickle.dumps(try_named(asked.name)))  # noqa: S301 - our own bytes
    with pytest.raises(UsageError) as alone:
        mutate([asked])
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda **_: Pool(lambda future: future.set_result(refusal)))
    with pytest.raises(UsageError) as together:
        mutate([asked, asked], jobs=2)

    assert str(together.value) == str(alone.value)


def test_a_worker_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = Pool(lambda future: future.set_exception(BrokenProcessPool("gone")))
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda **_: dying)

    with pytest.raises(
        AssayError, match=r"a worker process died while a fault was planted\n  fault +\S+, or one tried beside"
    ):
        mutate(FAULTS[:2], jobs=2)


Make = Callable[..., Outcome]


def test_a_mutation_passes_where_all_is_caught_and_nothing_cries_wolf(outcome: Make) -> None:
    good = outcome()
    elsewhere = Answer(case="toy/a", identical=False, steps=1, found="model", status="DIFFERENT")
    bad = {
        "hole": replace(good, fate=Fate.HOLE, seen=None),
        "void": replace(good, fate=Fate.VOID, seen=None, why="never reached"),
        "misplaced": replace(good, seen=elsewhere),
        "false alarm": replace(good, control=elsewhere),
    }

    assert Mutation(outcomes=(good, good)).passes
    assert Mutation(outcomes=(good, replace(good, seen=elsewhere, hidden="nobody looks there"))).passes
    assert not Mutation(outcomes=()).passes
    assert {name for name, one in bad.items() if Mutation(outcomes=(good, one)).passes} == set()
