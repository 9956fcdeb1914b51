"""mlx-lm as a bench worker: `python -m oracles.mlx_lm.bench_worker` in its environment, one JSON line a request.

Operations: `load` (snapshot, dtype) reads every weight; `run` (prompt_ids, num_tokens) generates greedily through mlx-lm's
own loop, with the same recorder as when goldens are made, so that the timed rows can be compared by digest.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from oracles.mlx_lm.capture import Recorder, to_tensor
from parity.errors import OracleError
from parity.timed_run import timed
from parity.worker_loop import serve

DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}


class OracleWorker:
    """Holds the loaded model."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load a snapshot and run one token through it, so that every weight has been read."""
        self._model = None
        mx.reset_peak_memory()
        start = time.perf_counter()
        self._model, _ = load_model(Path(request["snapshot"]))
        self._model.set_dtype(DTYPES[request["dtype"]])
        mx.eval(self._model(mx.array([[0]]), cache=make_prompt_cache(self._model)))
        return {"seconds": time.perf_counter() - start}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate and time."""
        if self._model is None:
            raise OracleError("nothing is loaded", next_step="send load first")
        mx.reset_peak_memory()
        answer = timed(self._generate(request["prompt_ids"], request["num_tokens"]), _bits)
        return {**answer, "peak_bytes": mx.get_peak_memory()}

    def _generate(self, prompt_ids: list[int], num_tokens: int) -> Iterator[tuple[Any, int]]:
        caches = make_prompt_cache(self._model)
        recorder = Recorder(num_tokens, caches, None)
        steps = generate_step(
            mx.array(prompt_ids),
            self._model,
            max_tokens=num_tokens,
            logits_processors=[recorder],
            prompt_cache=caches,
        )
        for index, (token, _) in enumerate(steps):
            yield recorder.rows[index], int(token)


def _bits(row: Any) -> bytes:  # noqa: ANN401 - an mx.array
    return to_tensor(row).data


if __name__ == "__main__":
    worker = OracleWorker()
    serve({"load": worker.load, "run": worker.run})
