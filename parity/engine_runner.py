"""The reference engine as a runner: a case in, a trace out.

Guarantees: bits leave mlx as unsigned words and are never converted; models are kept per snapshot and dtype, so that many
cases of one snapshot load it once. It runs; it does not judge.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.generate import Feed, Picker, forced, greedy, steps
from engine.model import CausalModel, open_model
from engine.taps import watching
from parity import case as cases
from parity.batch_engine import run_batch_case
from parity.engine_kv import engine_mode
from parity.errors import CaseError, UsageError, lay_out
from parity.home import assay_home
from parity.logit_rows import generated_rows, rounded
from parity.provenance import Provenance
from parity.sampler_engine import run_sampler_case
from parity.sampling import MODEL, Sampling
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, activation_name, logits_name

if TYPE_CHECKING:
    from engine.kernels.level import Kernels

KERNELS: Final = "ASSAY_KERNELS"
SAFETENSORS_DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32", mx.int32: "I32"}
PACKAGES = ("mlx", "mlx-cpu", "mlx-metal")


@dataclass(kw_only=True)
class EngineRunner:
    """Runs cases on the reference engine."""

    name: str = "engine"
    kernels: "Kernels | None" = field(default_factory=lambda: chosen_kernels())  # noqa: PLW0108 - it stands below
    _models: dict[tuple[str, str], CausalModel] = field(default_factory=dict)
    _model_rows: dict[tuple[str, tuple[int, ...], int], npt.NDArray[np.float32]] = field(default_factory=dict)

    def run(self, case: cases.Case, snapshot: Snapshot) -> Trace:
        """Run one case.

        Raises:
            EngineError: The snapshot, the prompt or an option does not fit; nothing was run.
            CaseError: The sampler is not one that the engine has.
        """
        if case.sampling is not None:
            return run_sampler_case(case, case.sampling, self._rows(case, case.sampling, snapshot))
        model = self._model(snapshot, case.dtype)
        if case.batch is not None:
            return run_batch_case(
                case, case.batch, model, feed=_feed(case.feed), kv=engine_mode(case.kv), to_tensor=to_tensor
            )
        tensors: dict[str, Tensor] = {}
        watched: dict[str, mx.array] = {}

        def watch(path: str, value: mx.array) -> None:
            if any(fnmatchcase(path, pattern) for pattern in case.record):
                watched[path] = value

        picked: list[int] = []
        kinds: tuple[str, ...] = ()
        # nobody watches where nothing is to be recorded: a fused step has no activations to show
        with watching(watch) if case.record else nullcontext():
            for step in steps(
                model,
                case.prompt_ids,
                num_steps=case.num_steps,
                pick=_picker(case),
                feed=_feed(case.feed),
                kv=engine_mode(case.kv),
            ):
                for path, value in watched.items():
                    tensors[activation_name(step.index, path)] = to_tensor(value[:, -1])
                watched.clear()
                tensors[logits_name(step.index)] = to_tensor(step.logits_BV)
                picked.append(step.token_id)
                kinds = tuple(cache.kind for cache in step.caches)
        tensors[TOKEN_IDS] = Tensor.of(np.array(picked, dtype="<i4"))
        return Trace(tensors=tensors, cache=kinds)

    def provenance(self) -> Provenance:
        """What the engine's bits rest on."""
        switches = {**self._provenance.switches, KERNELS: kernels_used(self.kernels)}
        return replace(self._provenance, switches=dict(sorted(switches.items())))

    @cached_property
    def _provenance(self) -> Provenance:
        return Provenance.capture(PACKAGES, device=device_name())

    def _rows(self, case: cases.Case, sampling: Sampling, snapshot: Snapshot) -> tuple[Tensor, ...]:
        """The rows of a sampler case in its dtype: generated, or a model's, computed once in float32."""
        if sampling.rows != MODEL:
            return rounded(generated_rows(sampling.rows, sampling.num_rows), case.dtype)
        key = (str(snapshot.path), case.prompt_ids, sampling.num_rows)
        if key not in self._model_rows:
            model = self._model(snapshot, "f32")
            rows = [step.logits_BV for step in steps(model, case.prompt_ids, num_steps=sampling.num_rows)]
            self._model_rows[key] = np.concatenate([np.array(row) for row in rows])
        return rounded(self._model_rows[key], case.dtype)

    def _model(self, snapshot: Snapshot, dtype: cases.DType) -> CausalModel:
        key = (str(snapshot.path), dtype)
        if key not in self._models:
            self._models.clear()  # one at a time: a gate goes through a snapshot's cases in a row
            model = open_model(snapshot.path, dtype=dtype)
            self._models[key] = (
                model if self.kernels is None else self.kernels.put_into(model, name=weights_name(snapshot, dtype))
            )
        return self._models[key]


def chosen_kernels(say: Callable[[str], None] | None = None) -> "Kernels | None":
    """What `ASSAY_KERNELS` asks for, by default the most that there is; None for `plain`.

    Args:
        say: Takes the one message where kernels turn out not to be used; standard error by default.

    Returns:
        None also where the compiler of the kernels is not installed and no level was asked for; that is said.

    Raises:
        UsageError: The variable names no level, or one whose compiler is not installed.
    """
    say, asked = say or say_on_stderr, os.environ.get(KERNELS)
    if asked == "plain":
        return None
    try:
        from engine.kernels.level import LEVELS, Kernels  # noqa: PLC0415 - brings a compiler that plain does not need
    except ModuleNotFoundError as error:
        if asked is not None:
            raise UsageError(
                f"{KERNELS}={asked} needs a package that is not installed",
                missing=error.name,
                next_step=f"make setup, or unset {KERNELS}",
            ) from error
        facts: dict[str, object] = {
            "missing": error.name,
            "instead": "plain mlx operations",
            "next": f"make setup, or {KERNELS}=plain",
        }
        say(lay_out("kernels need a package that is not installed", facts))
        return None
    if asked is not None and asked not in LEVELS:
        raise UsageError(
            f"{KERNELS} names no level of kernels",
            found=asked,
            known=", ".join(("plain", *LEVELS)),
            next_step=f"unset {KERNELS}, or set it to one of these",
        )
    return Kernels(folder=assay_home() / "kernels", say=say, level=asked or LEVELS[-1])


def kernels_used(kernels: "Kernels | None") -> str:
    """What provenance calls a choice: the level, or `plain` with the reason."""
    return "plain" if kernels is None else kernels.used


def say_on_stderr(message: str) -> None:
    """Print a message where results are not."""
    sys.stderr.write(f"{message}\n")


def weights_name(snapshot: Snapshot, dtype: str) -> str:
    """What a model is known by: a digest over the snapshot's files and the dtype."""
    return hashlib.sha256(json.dumps([dtype, sorted(snapshot.files.items())]).encode()).hexdigest()[:32]


def device_name() -> str:
    """`cpu` or `gpu`: what mlx computes on by default."""
    return "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"


def to_tensor(array: mx.array) -> Tensor:
    """Stored bits of an array of floats, or of 32-bit ids as a router or an indexer chooses them, evaluated."""
    words = array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size])
    return Tensor.of(np.array(words), dtype=SAFETENSORS_DTYPES[array.dtype])


def _picker(case: cases.Case) -> Picker:
    if case.forced_ids is not None:
        return forced(case.forced_ids)
    if case.sampler == "greedy":
        return greedy
    raise CaseError(
        f"the engine has no sampler {case.sampler!r}", case=case.name, known="greedy", next_step="use greedy"
    )


def _feed(feed: cases.Feed) -> Feed:
    if feed.mode == "whole":
        return Feed(whole=True)
    return Feed() if feed.chunk is None else Feed(piece=feed.chunk)
