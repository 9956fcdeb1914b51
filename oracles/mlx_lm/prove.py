"""Proof that capturing changes nothing: `python -m oracles.mlx_lm.prove SNAPSHOT` in the oracle's environment.

For each dtype, KV mode and feed the captured rows are compared, by digest, with those of a loop written by hand that calls
the model and converts the caches itself; a run with every module watched is compared with one without. Then faults are
planted (conversions left out, a start that only the loop's surplus step reaches) and must be noticed. Prints a line a check;
exit code 1 when one fails.
"""

import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from oracles.mlx_lm import capture as captured
from oracles.mlx_lm.cache_words import KVOptionIgnoredError, cache_words
from oracles.mlx_lm.capture import capture, to_tensor
from parity.case import KV, Case, Feed
from parity.trace import Trace, logits_name

PROMPT_LENGTH: Final = 40
NUM_STEPS: Final = 8
FEEDS: Final = ("whole", "chunk7", "tail-split")
KV_MODES: Final = (
    "fp", "kv8-g64", "kv4-g32-s16", "kv8-g64-s40", "kv8-g64-s44", "kv8-g64-after-prompt", "kv8-g64-from-empty", "max16-k4",
)  # fmt: skip
DTYPES: Final = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}


def main(snapshot: str) -> int:
    """Run all checks; 0 when they hold."""
    bad = 0
    for dtype in ("f32", "bf16"):
        model, _ = load_model(Path(snapshot))
        model.set_dtype(DTYPES[dtype])
        for kv, feed, forced in product(KV_MODES, FEEDS, (False, True)):
            case = _case(dtype, kv, feed, forced=forced)
            trace = capture(case, model)
            bad += _say(f"loop by hand   {case.name}", by_hand(case, model) == _rows(trace))
        for feed in FEEDS:
            case = _case(dtype, "kv8-g64", feed, forced=True)
            watched = capture(replace(case, record=("*",)), model)
            same = _rows(watched) == _rows(capture(case, model))
            bad += _say(f"taps           {case.name} ({len(watched.tensors)} tensors)", same)
        bad += _say(
            f"planted        {dtype}: conversion left out is noticed", _notices_missing_conversion(dtype, model)
        )
        bad += _say(f"surplus step   {dtype}: not in the cache words", _leaves_surplus_out(dtype, model))
    return 1 if bad else 0


def by_hand(case: Case, model: Any) -> list[str]:  # noqa: ANN401 - mlx-lm's modules have no types
    """Digests of the rows of a plain loop: forward, row, conversion, next id."""
    caches = list(make_prompt_cache(model))
    if case.kv.max_size is not None:
        caches = [RotatingKVCache(case.kv.max_size, keep=case.kv.keep) for _ in caches]
    if case.kv.order == "from-empty":
        caches = [QuantizedKVCache(group_size=case.kv.group_size, bits=case.kv.bits) for _ in caches]
    ids = list(case.prompt_ids)
    head = [] if case.feed.mode == "whole" else ids[:-1]
    size = case.feed.chunk or max(len(head), 1)
    for at in range(0, len(head), size):
        model(mx.array([head[at : at + size]]), cache=caches)
        if case.kv.order == "after-forward":
            _convert(case.kv, caches)
        mx.eval([cache.state for cache in caches])
    fed = ids[len(head) :]
    digests = []
    for step in range(case.num_steps):
        logits = model(mx.array([fed]), cache=caches)[:, -1]
        _convert(case.kv, caches)
        digests.append(to_tensor(logits).digest)
        best = int(np.array(mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1))[0])
        fed = [best if case.forced_ids is None else case.forced_ids[step]]
    return digests


def _convert(kv: KV, caches: list[Any]) -> None:
    if kv.bits is not None:
        for index, cache in enumerate(caches):
            if cache_words([cache]) == ("plain",) and cache.offset >= kv.start:
                caches[index] = cache.to_quantized(group_size=kv.group_size, bits=kv.bits)


def _notices_missing_conversion(dtype: str, model: Any) -> bool:  # noqa: ANN401 - as above
    """Leave mlx-lm's conversion out and see the case fail."""
    loop = import_module("mlx_lm.generate")  # the package's attribute of that name is a function
    places: list[Any] = [loop, captured]
    real = places[0].maybe_quantize_kv_cache

    def convert_nothing(*_args: object, **_kwargs: object) -> None:
        return

    noticed = 0
    for module in places:
        module.maybe_quantize_kv_cache = convert_nothing
    try:
        for feed in FEEDS:
            try:
                capture(_case(dtype, "kv8-g64", feed, forced=True), model)
            except KVOptionIgnoredError:
                noticed += 1
    finally:
        for module in places:
            module.maybe_quantize_kv_cache = real
    return noticed == len(FEEDS)


def _leaves_surplus_out(dtype: str, model: Any) -> bool:  # noqa: ANN401 - as above
    """A start that the last recorded step does not reach and the loop's surplus step does."""
    first_unreached = PROMPT_LENGTH + NUM_STEPS
    words = [
        set(capture(_case(dtype, f"kv8-g64-s{start}", feed, forced=True), model).cache)
        for feed in FEEDS
        for start in (first_unreached - 1, first_unreached)
    ]
    return words == [{"quantized-b8-g64"}, {"plain"}] * len(FEEDS)


def _rows(trace: Trace) -> list[str]:
    return [trace.tensors[logits_name(step)].digest for step in range(NUM_STEPS)]


def _case(dtype: Any, kv: str, feed: str, *, forced: bool) -> Case:  # noqa: ANN401 - one of two literals
    draw = np.random.Generator(np.random.PCG64(1)).integers(3, 500, PROMPT_LENGTH + NUM_STEPS).tolist()
    return Case(
        name=f"{dtype}/{kv}/{'forced' if forced else 'greedy'}/{feed}",
        snapshot="any",
        dtype=dtype,
        prompt_ids=tuple(draw[:PROMPT_LENGTH]),
        forced_ids=tuple(draw[PROMPT_LENGTH:]) if forced else None,
        feed=Feed.parse(feed),
        kv=KV.parse(kv),
        num_steps=NUM_STEPS,
    )


def _say(what: str, holds: bool) -> int:
    sys.stdout.write(f"{'ok  ' if holds else 'BAD '} {what}\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
