"""The runner's draws around a stand-in for mlx-optiq's engine: what is passed to it, what is refused, what is recorded."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parity.logit_rows import generated_rows, rounded
from parity.sampled_trace import UNIFORMS
from parity.sampling import Sampling, read_options
from parity.trace import Trace
from tests.oracles.shop import make_case

Run = Callable[..., Trace]


class StandIn:
    """Draws by Gumbel noise and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], str, float, dict[str, Any]]] = []
        self.shift = 0

    def draft(self, row: mx.array, temperature: float, **options: Any) -> tuple[int, None]:
        self.calls.append((row.shape, str(row.dtype), temperature, options))
        return self._draw(row, temperature), None

    def decode(self, row: mx.array, temperature: float) -> int:
        return (self._draw(row, temperature) + self.shift) % row.shape[0]

    def _draw(self, row: mx.array, temperature: float) -> int:
        return int((mx.random.categorical(row / temperature) if temperature else mx.argmax(row)).item())


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def run(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    engine = ModuleType("optiq.runtime.engine")
    engine._sample_with_dist, engine._logits_to_token = stand_in.draft, stand_in.decode  # type: ignore[attr-defined]
    for name, module in (("optiq", ModuleType("optiq")), ("optiq.runtime", ModuleType("optiq.runtime"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    runner = importlib.import_module("oracles.mlx_optiq.sampling")

    def run(options: dict[str, float], *, dtype: str = "f32", batch: int = 1) -> Trace:
        asked = Sampling(chain="optiq", options=read_options(options), rows="spread", num_rows=2, batch=batch, seed=5)
        case = make_case(num_steps=9, sampling=asked, snapshot="no-model", dtype=dtype)
        trace: Trace = runner.sample(case, asked, rounded(generated_rows("spread", 2), case.dtype))
        return trace

    yield run
    del sys.modules[runner.__name__]


@pytest.mark.parametrize(("dtype", "kind"), [("f32", "mlx.core.float32"), ("bf16", "mlx.core.bfloat16")])
def test_each_row_is_handed_over_as_a_vector_in_the_cases_dtype(
    run: Run, stand_in: StandIn, dtype: str, kind: str
) -> None:
    run({"temperature": 0.7, "top_k": 3, "min_p": 0.1}, dtype=dtype)
    assert stand_in.calls == [((256,), kind, 0.7, {"top_k": 3, "min_p": 0.1})] * 9


def test_rows_are_taken_in_turn_and_greedy_needs_no_uniforms(run: Run) -> None:
    trace = run({"temperature": 0.0})
    best = generated_rows("spread", 2).argmax(axis=-1).tolist()
    assert list(trace.token_ids) == [best[step % 2] for step in range(9)]
    assert UNIFORMS not in trace.tensors


def test_the_uniforms_are_those_that_became_the_noise_of_the_ids(run: Run) -> None:
    trace = run({"temperature": 30.0})
    state = mx.random.key(5)
    rows = generated_rows("spread", 2)
    for step, token in enumerate(trace.token_ids):
        state, key = mx.random.split(state)
        drawn = np.array(mx.random.uniform(shape=(256,), key=key))
        noisy = rows[step % 2] / 30 - np.log(-np.log(drawn.astype(np.float64)))
        assert noisy.argmax() == token
        assert trace.tensors[UNIFORMS].values()[step, 0] == drawn[token]


def test_two_ways_to_draw_that_disagree_are_refused(run: Run, stand_in: StandIn) -> None:
    stand_in.shift = 1
    with pytest.raises(ValueError, match="two ways to draw disagree 9 times, first at draw 0: "):
        run({"temperature": 0.7})
    run({"temperature": 0.7, "top_p": 0.9})  # the other way has no filters, so it is not asked


def test_what_its_engine_lacks_is_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="mlx-optiq's engine has no option xtc_probability"):
        run({"temperature": 0.7, "xtc_probability": 0.5})
    with pytest.raises(ValueError, match="draws one row at a time, not 3"):
        run({"temperature": 0.7}, batch=3)
