"""The engine as a bench worker: `python -m bench.engine_worker`, one JSON line a request.

Operations: `load` (snapshot, dtype; optionally name, threads, folder) reads every weight and puts the kernels in that
`ASSAY_KERNELS` asks for, compiled code kept in the folder; `run` (prompt_ids, num_tokens) generates greedily with tail split;
`export` (prompt_ids, file) writes the keys and values of all but the last token of a prompt, for a peer that is slow to compute
them; `read` (threads, mib) reads memory; `sample` (options, seed, num_rows, vocabulary, prompt_ids, num_draws) draws through
`ChainPicker`, as generation does.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.bandwidth import read_bandwidth
from bench.samplers import rows
from bench.weights_read import weight_bytes
from engine.cache.plain import PlainCache
from engine.cache.rotating import RotatingCache
from engine.errors import EngineError
from engine.generate import Feed, steps
from engine.kernels.history import FusedCache
from engine.model import CausalModel, open_model
from engine.sampling.chain import Chain
from engine.sampling.keys import SequentialKeys
from engine.sampling.picker import ChainPicker
from engine.sampling.processors import Processing
from parity.engine_runner import chosen_kernels, kernels_used, to_tensor
from parity.errors import AssayError
from parity.peak_memory import peak_resident_bytes, reset_peak
from parity.sampler_engine import OF_CHAIN
from parity.sampling import read_options
from parity.timed_run import timed
from parity.worker_loop import serve


class EngineWorker:
    """Holds the loaded model."""

    def __init__(self) -> None:
        self._model: CausalModel | None = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open a snapshot and run one token through it, so that every weight has been read."""
        self._model = None
        reset_peak()
        start = time.perf_counter()
        try:
            model = open_model(Path(request["snapshot"]), dtype=request["dtype"])
            kernels = chosen_kernels()
            if kernels is not None:
                kernels.threads = request.get("threads", kernels.threads)
                kernels.folder = Path(request["folder"]) if "folder" in request else kernels.folder
                model = kernels.put_into(model, name=request.get("name"))
        except EngineError as error:
            raise _ours(error) from error
        self._model = model
        next(steps(model, [0], num_steps=1))
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "kernels": kernels_used(kernels), "weight_bytes": weight_bytes(model)}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate and time."""
        reset_peak()
        answer = timed(self._generate(request["prompt_ids"], request["num_tokens"]), _bits)
        return {**answer, "peak_bytes": peak_resident_bytes()}

    def export(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write keys and values [1, K, L - 1, E] of every layer as safetensors.

        A ring that got all of them at once holds all of them, in order, until the next ones come.
        """
        if self._model is None:
            raise AssayError("nothing is loaded", next_step="send load first")
        *first, _ = request["prompt_ids"]
        (step,) = steps(self._model, first, num_steps=1, feed=Feed(whole=True))  # as a prompt but for its last token is
        arrays: dict[str, mx.array] = {}
        for index, cache in enumerate(step.caches):
            plain = cache.plain() if isinstance(cache, FusedCache) else cache
            if not isinstance(plain, PlainCache | RotatingCache) or plain.keys is None or plain.values is None:
                raise AssayError(
                    "only plain caches and rings can be handed to a peer",
                    found=plain.kind,
                    next_step="measure another model",
                )
            arrays[f"{index}.keys"] = mx.contiguous(plain.keys[:, :, : plain.offset])
            arrays[f"{index}.values"] = mx.contiguous(plain.values[:, :, : plain.offset])
        mx.eval(arrays)
        mx.save_safetensors(request["file"], arrays)
        return {"positions": len(first), "layers": len(step.caches)}

    def read(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read memory that no cache holds; needs no model."""
        return {"bytes_per_second": read_bandwidth(request["threads"], request["mib"])}

    def sample(self, request: dict[str, Any]) -> dict[str, Any]:
        """Draw and time; needs no model. `rows` is the digest of the rows in the order in which they were drawn from."""
        if request["num_draws"] < 1:
            raise AssayError("nothing to draw", num_draws=request["num_draws"], next_step="draw at least once")
        arrays = [mx.array(row[None]) for row in rows(request["seed"], request["num_rows"], request["vocabulary"])]
        mx.eval(arrays)
        try:
            answer = timed(_draws(arrays, _picker(request), request["num_draws"]), _bits)
        except EngineError as error:
            raise _ours(error) from error
        seconds = answer["prompt_seconds"] + answer["decode_seconds"]
        return {"seconds": seconds, "ids": answer["token_ids"], "rows": answer["logits"]}

    def _generate(self, prompt_ids: list[int], num_tokens: int) -> Iterator[tuple[object, int]]:
        if self._model is None:
            raise AssayError("nothing is loaded", next_step="send load first")
        for step in steps(self._model, prompt_ids, num_steps=num_tokens):
            yield step.logits_BV, step.token_id


def _picker(request: dict[str, Any]) -> ChainPicker:
    options: dict[str, Any] = dict(read_options(request["options"]))
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    return ChainPicker(
        Chain(**{name: value for name, value in options.items() if name in OF_CHAIN}),
        request["prompt_ids"],
        keys=SequentialKeys.of(request["seed"]),
        processing=Processing(**{name: value for name, value in options.items() if name not in OF_CHAIN}),
    )


def _draws(arrays: list[mx.array], pick: ChainPicker, num_draws: int) -> Iterator[tuple[object, int]]:
    for index in range(num_draws):
        row = arrays[index % len(arrays)]
        yield row, pick(row, index)


def _ours(error: EngineError) -> AssayError:
    """The same message as one of the command line's."""
    return AssayError(error.what, **error.facts, next_step=error.next_step)


def _bits(row: object) -> bytes:
    if not isinstance(row, mx.array):
        raise TypeError("a row is an mlx array")
    return to_tensor(row).data


if __name__ == "__main__":
    worker = EngineWorker()
    serve(
        {"load": worker.load, "run": worker.run, "export": worker.export, "read": worker.read, "sample": worker.sample}
    )
