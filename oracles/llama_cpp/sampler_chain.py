"""A chain of llama.cpp's own samplers, made through its C interface, applied to rows of logits that we choose.

Guarantees: every sampler, sort, sum and draw is llama.cpp's; only the candidate array is filled here, all ids in their order,
unsorted, probabilities 0. A sampler that llama.cpp does not make for the given options is an error, never left out.
"""

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

# Installed only in this oracle's environment, where nothing checks types.
_LLAMA: Final[Any] = importlib.import_module("llama_cpp.llama_cpp")
CANDIDATE: Final = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])

# Sampler name to llama.cpp's function and its arguments in order; those in capitals are not options of a case. DRY gets no
# vocabulary and so no sequence breakers: those are strings, and only a model could turn them into tokens.
CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "logit_bias": ("llama_sampler_init_logit_bias", "VOCABULARY", "BIASES", "bias"),
    "penalties": ("llama_sampler_init_penalties", "VOCABULARY", "last_n", "repeat", "frequency", "presence"),
    "dry": ("llama_sampler_init_dry", "NOTHING", "multiplier", "base", "allowed_length", "last_n", "NOTHING", "ZERO"),
    "top_n_sigma": ("llama_sampler_init_top_n_sigma", "n"),
    "top_k": ("llama_sampler_init_top_k", "k"),
    "typical_p": ("llama_sampler_init_typical", "p", "min_keep"),
    "top_p": ("llama_sampler_init_top_p", "p", "min_keep"),
    "min_p": ("llama_sampler_init_min_p", "p", "min_keep"),
    "xtc": ("llama_sampler_init_xtc", "probability", "threshold", "min_keep", "SEED"),
    "temperature": ("llama_sampler_init_temp", "temperature"),
    "dynamic_temperature": ("llama_sampler_init_temp_ext", "temperature", "delta", "exponent"),
    "greedy": ("llama_sampler_init_greedy",),
    "dist": ("llama_sampler_init_dist", "SEED"),
    "mirostat": ("llama_sampler_init_mirostat", "VOCABULARY", "SEED", "tau", "eta", "m"),
    "mirostat_v2": ("llama_sampler_init_mirostat_v2", "SEED", "tau", "eta"),
}
DEFAULTS: Final[Mapping[str, Any]] = {
    "min_keep": 1,
    "repeat": 1.0,
    "frequency": 0.0,
    "presence": 0.0,
    "m": 100,
    "NOTHING": None,
    "ZERO": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """The candidate array after samplers were applied.

    Attributes:
        ids: Token ids in the array's order, int32 [N].
        logits: float32 [N].
        probs: float32 [N]; what the last sampler that computes probabilities left.
        selected: Id that the last sampler chose; None where none chooses.
    """

    ids: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]
    probs: npt.NDArray[np.float32]
    selected: int | None


class SamplerChain:
    """llama.cpp samplers in order, with their state.

    Args:
        steps: A table a sampler: `name` and its options, as `CALLS` lists them.
        seed: Of every sampler that draws; each gets a generator of its own.
        vocabulary: V of the rows to come.

    Raises:
        ValueError: There is no such sampler, an option is unknown or missing, or llama.cpp refuses.
    """

    def __init__(self, steps: Sequence[Mapping[str, Any]], *, seed: int, vocabulary: int) -> None:
        self._handles = [_make(step, seed=seed, vocabulary=vocabulary) for step in steps]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            _LLAMA.llama_sampler_free(handle)
        self._handles = []

    def accept(self, token: int) -> None:
        """Tell every sampler that a token was accepted."""
        for handle in self._handles:
            _LLAMA.llama_sampler_accept(handle, token)

    def apply(self, logits_V: npt.NDArray[np.float32]) -> After:
        """Apply every sampler in order to a fresh array of all ids."""
        array = np.zeros(len(logits_V), dtype=CANDIDATE)
        array["id"] = np.arange(len(logits_V))
        array["logit"] = logits_V
        view = _LLAMA.llama_token_data_array(
            data=array.ctypes.data_as(_LLAMA.llama_token_data_p), size=len(array), selected=-1, sorted=False
        )
        for handle in self._handles:
            _LLAMA.llama_sampler_apply(handle, ctypes.byref(view))
        size = view.size * CANDIDATE.itemsize  # samplers may move the pointer
        left = np.frombuffer(ctypes.string_at(view.data, size), dtype=CANDIDATE)
        selected = int(left["id"][view.selected]) if view.selected >= 0 else None
        return After(ids=left["id"].copy(), logits=left["logit"].copy(), probs=left["p"].copy(), selected=selected)


def _make(step: Mapping[str, Any], *, seed: int, vocabulary: int) -> Any:  # noqa: ANN401 - a pointer of llama.cpp
    options = dict(step)
    name = options.pop("name")
    if name not in CALLS:
        raise ValueError(f"unknown sampler {name!r}; known: {', '.join(CALLS)}")
    call, *arguments = CALLS[name]
    if unknown := options.keys() - set(arguments):
        raise ValueError(f"sampler {name!r} does not take {', '.join(sorted(unknown))}")
    values = {**DEFAULTS, "SEED": seed, "VOCABULARY": vocabulary, **options}
    if "bias" in options:
        entries = [(int(token), value) for token, value in options["bias"].items()]
        values |= {"bias": (_LLAMA.llama_logit_bias * len(entries))(*entries), "BIASES": len(entries)}
    if missing := set(arguments) - values.keys():
        raise ValueError(f"sampler {name!r} needs {', '.join(sorted(missing))}")
    handle = getattr(_LLAMA, call)(*(values[argument] for argument in arguments))
    if not handle:
        raise ValueError(f"llama.cpp made no sampler {name!r} of {options}")
    return handle
