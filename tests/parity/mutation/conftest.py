"""What a trial keeps between faults must not outlive a test, whose snapshots lie in a folder of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parity.mutation import trial, written_prompts
from parity.mutation.trial import Answer, Fate, Outcome


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    kept = (trial._cases, trial._snapshot, trial._golden, trial._provenance, written_prompts._folder)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.fixture
def outcome() -> Callable[..., Outcome]:
    def make(**changes: Any) -> Outcome:
        defaults: dict[str, Any] = {
            "fault": "eps/llama/a",
            "kind": "eps",
            "says": "eps of a norm is wrong",
            "at": "model.norm",
            "hidden": "",
            "fate": Fate.CAUGHT,
            "seen": Answer(case="toy/a", identical=False, steps=1, found="model.norm", status="DIFFERENT"),
            "asked": 1,
            "control": Answer(case="toy/a", identical=True),
        }
        return Outcome(**{**defaults, **changes})

    return make
