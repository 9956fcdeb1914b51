"""mlx-lm as a bench worker: `python -m oracles.mlx_lm.bench_worker` in its environment, one JSON line a request.

Operations: `load` (snapshot, dtype) reads every weight; `run` (prompt_ids, num_tokens; optionally cache) generates greedily
through mlx-lm's own loop, with the same recorder as when goldens are made, so that the timed rows can be compared by digest;
with `cache`, a file of keys and values, all but the prompt's last token count as computed, and its clock says nothing; `sample`
(options, seed, num_rows, vocabulary, prompt_ids, num_draws) draws through its sampler and processors, called as that loop
calls them.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load_model

from oracles.mlx_lm.capture import Recorder, to_tensor
from oracles.mlx_lm.sampling import PROCESSOR_NAMES, SAMPLER_NAMES
from parity.errors import OracleError
from parity.logit_rows import GENERATED
from parity.peak_memory import peak_resident_bytes, reset_peak
from parity.sampling import read_options
from parity.timed_run import timed
from parity.worker_loop import serve

DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
KINDS = (KVCache, RotatingKVCache)  # that can be filled with given keys and values


class OracleWorker:
    """Holds the loaded model."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load a snapshot and run one token through it, so that every weight has been read."""
        self._model = None
        reset_peak()
        start = time.perf_counter()
        self._model, _ = load_model(Path(request["snapshot"]))
        self._model.set_dtype(DTYPES[request["dtype"]])
        mx.eval(self._model(mx.array([[0]]), cache=make_prompt_cache(self._model)))
        return {"seconds": time.perf_counter() - start}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate and time."""
        if self._model is None:
            raise OracleError("nothing is loaded", next_step="send load first")
        reset_peak()
        caches, prompt_ids = make_prompt_cache(self._model), request["prompt_ids"]
        if "cache" in request:
            _fill(caches, request["cache"], len(prompt_ids) - 1)
            prompt_ids = prompt_ids[-1:]
        answer = timed(self._generate(prompt_ids, request["num_tokens"], caches), _bits)
        return {**answer, "peak_bytes": peak_resident_bytes()}

    def sample(self, request: dict[str, Any]) -> dict[str, Any]:
        """Draw and time; needs no model. `rows` is the digest of the rows in the order in which they were drawn from."""
        if request["num_draws"] < 1:
            raise OracleError("nothing to draw", num_draws=request["num_draws"], next_step="draw at least once")
        arrays = _rows(request["seed"], request["num_rows"], request["vocabulary"])
        try:
            answer = timed(_draws(arrays, _picker(request), request["num_draws"]), _bits)
        except ValueError as error:
            raise OracleError(
                "mlx-lm refuses the options", reason=error, next_step="correct the options of the sampler"
            ) from error
        seconds = answer["prompt_seconds"] + answer["decode_seconds"]
        return {"seconds": seconds, "ids": answer["token_ids"], "rows": answer["logits"]}

    def _generate(self, prompt_ids: list[int], num_tokens: int, caches: list[Any]) -> Iterator[tuple[Any, int]]:
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


def _fill(caches: list[Any], file: str, positions: int) -> None:
    """Put keys and values that another process computed into plain caches and into rings, all at once."""
    arrays: Any = mx.load(file)
    if len(arrays) != 2 * len(caches) or any(type(cache) not in KINDS for cache in caches):
        raise OracleError(
            "the keys and values do not fit the model's caches",
            layers=f"{len(arrays) // 2} given, {len(caches)} wanted",
            next_step="export them from the same snapshot",
        )
    for index, cache in enumerate(caches):
        cache.update_and_fetch(arrays[f"{index}.keys"], arrays[f"{index}.values"])
        if cache.offset != positions:
            raise OracleError(
                "the keys and values are of another prompt",
                positions=f"{cache.offset} given, {positions} wanted",
                next_step="export them for the same prompt",
            )
    mx.eval([cache.state for cache in caches])


def _rows(seed: int, num_rows: int, vocabulary: int) -> list[Any]:
    """Rows [1, V] in float32; bench/samplers.py generates the same ones, and compares."""
    words = np.random.PCG64(seed).random_raw(num_rows * vocabulary) >> np.uint64(44)
    arrays = [mx.array(row[None]) for row in GENERATED["spread"](words.astype(np.int64).reshape(num_rows, vocabulary))]
    mx.eval(arrays)
    return arrays


def _picker(request: dict[str, Any]) -> Callable[[Any], int]:
    """What turns a row into an id; seeds the global stream, and keeps what was drawn as history."""
    options: dict[str, Any] = dict(read_options(request["options"]))
    for name, kind in (("logit_bias", dict), ("xtc_special", list)):
        if name in options:
            options[name] = kind(options[name])
    sampler = make_sampler(**{SAMPLER_NAMES[n]: value for n, value in options.items() if n in SAMPLER_NAMES})
    processors = make_logits_processors(
        **{PROCESSOR_NAMES[n]: value for n, value in options.items() if n in PROCESSOR_NAMES}
    )
    history = mx.array(request["prompt_ids"])
    mx.random.seed(request["seed"])

    def pick(row: Any) -> int:  # noqa: ANN401 - an mx.array
        nonlocal history
        logits = mx.array(row)  # some processors write into what they are given
        for processor in processors:
            logits = processor(history, logits)
        drawn = sampler(logits - mx.logsumexp(logits, keepdims=True))
        if processors:
            history = mx.concatenate([history, drawn])
        return int(drawn.item())

    return pick


def _draws(arrays: list[Any], pick: Callable[[Any], int], num_draws: int) -> Iterator[tuple[object, int]]:
    for index in range(num_draws):
        row = arrays[index % len(arrays)]
        yield row, pick(row)


def _bits(row: Any) -> bytes:  # noqa: ANN401 - an mx.array
    return to_tensor(row).data


if __name__ == "__main__":
    worker = OracleWorker()
    serve({"load": worker.load, "run": worker.run, "sample": worker.sample})
