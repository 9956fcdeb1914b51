"""Batch cases on mlx-optiq's quantised batch caches, through mlx-lm's batched loop.

mlx-optiq gives that loop caches that pack from the first token on, in the place of every plain one; here they are given in the
same way, sequence by sequence, so that the loop itself stays as mlx-lm has it.

Guarantees: a width that was asked for and did not come is an error. It happens: a batch that mlx-optiq makes of caches that are
all still empty forgets their width and packs in 8 bits, groups of 64.
"""

from importlib import import_module
from typing import Any

from mlx_lm.models.cache import KVCache, make_prompt_cache

from oracles.mlx_lm.batch import capture_batch
from oracles.mlx_lm.cache_words import KVOptionIgnoredError
from parity.batch import Batch
from parity.case import Case
from parity.trace import Trace


def capture_quantized_batch(case: Case, batch: Batch, model: Any) -> Trace:  # noqa: ANN401 - mlx-lm's modules have no types
    """Run a batch case that packs from empty caches on.

    Raises:
        NotImplementedError: The KV mode is another one.
        KVOptionIgnoredError: A cache was packed in another width than asked for, or not at all.
    """
    kv = case.kv
    if kv.bits is None or kv.order != "from-empty" or kv.max_size is not None or kv.tile is not None:
        raise NotImplementedError(
            f"{kv.name}: mlx-optiq's batches pack every plain cache from empty on, and do no more"
        )
    bits, group_size = kv.bits, kv.group_size
    theirs: Any = import_module("optiq.runtime.kv.batch")  # mlx-optiq is loaded already, with its patches in order

    def make_caches(model: Any) -> list[Any]:  # noqa: ANN401 - likewise
        return [
            theirs.MergeableQuantizedKVCache(group_size=group_size, bits=bits) if type(cache) is KVCache else cache
            for cache in make_prompt_cache(model)
        ]

    def padded(cache: Any, padding: list[int]) -> Any:  # noqa: ANN401 - likewise
        if type(cache) is not theirs.MergeableQuantizedKVCache:
            return None
        return theirs.BatchQuantizedKVCache(padding, group_size=cache.group_size, bits=cache.bits)

    trace = capture_batch(case, batch, model, make_caches, padded)
    wanted = f"batch-quantized-b{bits}-g{group_size}"
    packed = {word for word in trace.cache if not word.startswith("arrays-")}
    if packed != {wanted}:
        raise KVOptionIgnoredError(
            f"asked for {wanted}, caches of the last forward: {', '.join(trace.cache) or 'none'}"
        )
    return trace
