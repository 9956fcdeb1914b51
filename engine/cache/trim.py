"""Forgetting the last tokens of a sequence or a batch, in all layers or in none."""

from collections.abc import Sequence

from engine.cache.protocol import Cache
from engine.errors import RequestError


def trimmed(caches: Sequence[Cache], n: int) -> tuple[Cache, ...]:
    """Every layer's cache without the last `n` tokens; appending them again gives the bits of caches that never lost them.

    What was packed stays packed: where a cache was converted among the forgotten tokens, the same tokens attend to packed keys
    from the first when they are fed again.

    Raises:
        RequestError: A layer's cache is not trimmable, or holds fewer tokens.
    """
    if n and (stuck := sorted({cache.kind for cache in caches if not cache.trimmable})):
        raise RequestError(
            "the caches cannot forget their last tokens",
            kinds=", ".join(stuck),
            tokens=n,
            reason="what these replaced is gone",
            next_step="keep the caches as they were before them, or compute them again",
        )
    return tuple(cache.trim(n) for cache in caches)
