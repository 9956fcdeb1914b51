"""The runner of mlx-lm: `python -m oracles.mlx_lm.run REQUEST.json` in its environment, from the repository root.

Models are loaded by mlx-lm's own loader and cast to the case's dtype. Request, traces and events are those of
`oracles.runner_loop`; what a case's rows are is in `oracles.mlx_lm.capture`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from oracles.runner_loop import RunCase, serve
from parity.batch import Batch
from parity.case import Case
from parity.logit_rows import generated_rows, rounded
from parity.provenance import Provenance
from parity.sampling import MODEL, Sampling
from parity.tensor import Tensor
from parity.trace import Trace

PACKAGES: Final = ("mlx", "mlx-cpu", "mlx-metal", "mlx-lm")


def start() -> tuple[RunCase, Provenance]:
    """Import mlx-lm, which takes seconds and may print."""
    import mlx.core as mx  # noqa: PLC0415 - as the docstring says

    from oracles.mlx_lm.batch import capture_batch  # noqa: PLC0415 - likewise
    from oracles.mlx_lm.capture import capture  # noqa: PLC0415 - likewise
    from oracles.mlx_lm.sampling import sample  # noqa: PLC0415 - likewise

    models = Models(capture, sample, capture_batch)
    return models.run, Provenance.capture(PACKAGES, device=mx.default_device().type.name)


class Models:
    """The model loaded last: tasks arrive grouped by snapshot and dtype, so one at a time is enough."""

    def __init__(
        self,
        capture: Callable[[Case, Any], Trace],
        sample: Callable[[Case, Sampling, Sequence[Tensor]], Trace],
        capture_batch: Callable[[Case, Batch, Any], Trace] | None = None,
    ) -> None:
        self._capture = capture
        self._capture_batch = capture_batch
        self._sample = sample
        self._rows: dict[tuple[Path, tuple[int, ...], int], Any] = {}
        self._key: tuple[Path, str] | None = None
        self._loaded: tuple[Any, int] | None = None

    def run(self, case: Case, path: Path) -> Trace:
        """Run a case.

        Raises:
            ValueError: It names token ids that the model does not have.
            NotImplementedError: It is a batch case, and nothing here captures those.
        """
        if case.sampling is not None:
            return self._sample(case, case.sampling, self._rows_of(case, case.sampling, path))
        model, vocabulary = self._get(path, case.dtype)
        check_ids(case, vocabulary)
        if case.batch is not None:
            if self._capture_batch is None:
                raise NotImplementedError("this oracle runs no batches")
            return self._capture_batch(case, case.batch, model)
        return self._capture(case, model)

    def _rows_of(self, case: Case, sampling: Sampling, path: Path) -> Sequence[Tensor]:
        """The rows of a sampler case in its dtype: generated, or the model's, computed once in float32."""
        if sampling.rows != MODEL:
            return rounded(generated_rows(sampling.rows, sampling.num_rows), case.dtype)
        key = (path, case.prompt_ids, sampling.num_rows)
        if key not in self._rows:
            plain = replace(case, dtype="f32", sampler="greedy", num_steps=sampling.num_rows, sampling=None)
            trace = self.run(plain, path)
            self._rows[key] = np.concatenate([trace.logits(row).values() for row in range(sampling.num_rows)])
        return rounded(self._rows[key], case.dtype)

    def _get(self, path: Path, dtype: str) -> tuple[Any, int]:
        """The model, cast, and the size of its vocabulary."""
        import mlx.core as mx  # noqa: PLC0415 - see start
        from mlx_lm.utils import load_model  # noqa: PLC0415 - see start

        if self._loaded is None or self._key != (path, dtype):
            self._loaded = None  # the old model goes before the new one comes
            model, config = load_model(path)
            model.set_dtype({"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}[dtype])
            mx.eval(model.parameters())
            self._key, self._loaded = (path, dtype), (model, vocabulary_of(config, model))
        return self._loaded


def vocabulary_of(config: dict[str, Any], model: Any) -> int:  # noqa: ANN401 - an mlx-lm model
    """Size of a model's vocabulary, from its config, the text part of it, or the loaded model's own arguments."""
    for place in (config, config.get("text_config", {})):
        if "vocab_size" in place:
            return int(place["vocab_size"])
    return int(model.args.vocab_size)


def check_ids(case: Case, vocabulary: int) -> None:
    """Refuse ids that the embedding does not have: mlx would read past its end without a word.

    Raises:
        ValueError: There are such ids.
    """
    outside = [i for i in (*case.prompt_ids, *(case.forced_ids or ())) if not 0 <= i < vocabulary]
    if outside:
        raise ValueError(f"token ids {outside[:5]} lie outside the vocabulary of {vocabulary}")


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], start))
