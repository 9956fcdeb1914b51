"""llama.cpp as a bench worker: `python -m oracles.xllamacpp.bench_worker` in its environment, one JSON line a request.

Operations: `load` (file, threads, context) opens a GGUF file and runs one token; `run` (prompt_ids, num_tokens) generates
greedily. The clock is llama.cpp's own: `prompt_ms` and `predicted_ms`, which leave HTTP, JSON and text out; it counts the first
token to the prompt. Nothing of an earlier request is reused. What it computes is not compared: its sums have another order.
"""

import importlib
import json
import time
from typing import Any, Final

from parity.errors import OracleError
from parity.peak_memory import peak_resident_bytes, reset_peak
from parity.worker_loop import serve

# Installed only in this peer's environment, where nothing checks types.
_LLAMA: Final[Any] = importlib.import_module("xllamacpp")


class LlamaCppWorker:
    """Holds the loaded model."""

    def __init__(self) -> None:
        self._server: Any = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open a file and run one token through it, so that every weight has been read."""
        self._server = None
        reset_peak()
        start = time.perf_counter()
        params = _LLAMA.CommonParams()
        params.model.path = request["file"]
        params.n_ctx, params.n_parallel, params.n_gpu_layers = request["context"], 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
        params.warmup = False
        self._server = _LLAMA.Server(params)
        self._complete([1], 1)
        return {"seconds": time.perf_counter() - start}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate and time."""
        reset_peak()
        timings = self._complete(request["prompt_ids"], request["num_tokens"])
        counted = (timings["prompt_n"], timings["predicted_n"])
        if counted != (len(request["prompt_ids"]), request["num_tokens"]):
            raise OracleError(
                "llama.cpp did not do what was asked",
                asked=f"{len(request['prompt_ids'])} tokens of a prompt, {request['num_tokens']} after it",
                done=f"{counted[0]} and {counted[1]}",
                next_step="see what oracles/xllamacpp/bench_worker.py sends it",
            )
        return {
            "prompt_seconds": timings["prompt_ms"] / 1e3,
            "decode_seconds": timings["predicted_ms"] / 1e3,
            "num_tokens": counted[1],
            "peak_bytes": peak_resident_bytes(),
        }

    def _complete(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        if self._server is None:
            raise OracleError("nothing is loaded", next_step="send load first")
        asked = {
            "prompt": prompt_ids,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self._server.handle_completions(asked)
        described = json.loads(answer) if isinstance(answer, str | bytes) else answer
        if "timings" not in described:
            raise OracleError(
                "llama.cpp refuses the request", reason=described.get("error", described), next_step="mend the request"
            )
        timings: dict[str, Any] = described["timings"]
        return timings


if __name__ == "__main__":
    worker = LlamaCppWorker()
    serve({"load": worker.load, "run": worker.run})
