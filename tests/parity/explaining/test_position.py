"""The position that differs first is found wherever it is, in few rounds, and both halves of the answer were run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parity.case import Case, Feed
from parity.explaining.position import shortest_prompt
from parity.kv import KV
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace

SNAPSHOT = Snapshot(name="x", path=Path(), files={}, config={})


@dataclass
class FromPosition:
    """A runner whose row is another one from a length of the prompt on; None never is."""

    differs_from: int | None
    name: str = "x"
    asked: list[list[int]] = field(default_factory=list)

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        return self.run_all([case], snapshot)[0]

    def run_all(self, cases: Sequence[Case], snapshot: Snapshot) -> list[Trace]:
        del snapshot
        self.asked.append([len(case.prompt_ids) for case in cases])
        return [self._trace(len(case.prompt_ids)) for case in cases]

    def provenance(self) -> Provenance:
        raise NotImplementedError

    def _trace(self, length: int) -> Trace:
        off = self.differs_from is not None and length >= self.differs_from
        row = Tensor.of(np.array([[1.0, 2.0 + off]], dtype="<f4"))
        return Trace(tensors={"logits/0": row, TOKEN_IDS: Tensor.of(np.array([1], dtype="<i4"))})


def case_of(length: int) -> Case:
    return Case(
        name="x",
        snapshot="x",
        dtype="f32",
        prompt_ids=tuple(range(length)),
        forced_ids=None,
        feed=Feed(mode="whole"),
        kv=KV(),
        num_steps=1,
        record=("*",),
    )


@given(length=st.integers(1, 300), data=st.data())
def test_the_shortest_prompt_is_found_and_the_one_below_it_was_run(length: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, length))
    engine = FromPosition(at)
    found = shortest_prompt(case_of(length), SNAPSHOT, FromPosition(None), engine)
    assert found is not None
    assert len(found.case.prompt_ids) == at
    assert found.sighting.ids == tuple(range(at))
    ran = {length for asked in engine.asked for length in asked}
    assert at in ran
    assert at == 1 or at - 1 in ran
    assert len(engine.asked) <= 5


@given(length=st.integers(1, 100))
def test_a_difference_that_no_shorter_prompt_shows_is_not_made_up(length: int) -> None:
    assert shortest_prompt(case_of(length), SNAPSHOT, FromPosition(None), FromPosition(None)) is None
