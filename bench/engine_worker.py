"""The engine as a bench worker: `python -m bench.engine_worker`, one JSON line a request.

Operations: `load` (snapshot, dtype) reads every weight; `run` (prompt_ids, num_tokens) generates greedily with tail split.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.errors import EngineError
from engine.generate import steps
from engine.model import CausalModel, open_model
from parity.engine_runner import to_tensor
from parity.errors import AssayError
from parity.timed_run import timed
from parity.worker_loop import serve


class EngineWorker:
    """Holds the loaded model."""

    def __init__(self) -> None:
        self._model: CausalModel | None = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open a snapshot and run one token through it, so that every weight has been read."""
        self._model = None
        mx.reset_peak_memory()
        start = time.perf_counter()
        try:
            self._model = open_model(Path(request["snapshot"]), dtype=request["dtype"])
        except EngineError as error:
            raise AssayError(error.what, **error.facts, next_step=error.next_step) from error
        next(steps(self._model, [0], num_steps=1))
        return {"seconds": time.perf_counter() - start}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate and time."""
        mx.reset_peak_memory()
        answer = timed(self._generate(request["prompt_ids"], request["num_tokens"]), _bits)
        return {**answer, "peak_bytes": mx.get_peak_memory()}

    def _generate(self, prompt_ids: list[int], num_tokens: int) -> Iterator[tuple[object, int]]:
        if self._model is None:
            raise AssayError("nothing is loaded", next_step="send load first")
        for step in steps(self._model, prompt_ids, num_steps=num_tokens):
            yield step.logits_BV, step.token_id


def _bits(row: object) -> bytes:
    if not isinstance(row, mx.array):
        raise TypeError("a row is an mlx array")
    return to_tensor(row).data


if __name__ == "__main__":
    worker = EngineWorker()
    serve({"load": worker.load, "run": worker.run})
