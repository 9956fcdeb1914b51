"""What kind of batch cache each layer had, in the words of a trace."""

from collections.abc import Sequence

from oracles.mlx_lm.cache_words import cache_words


def batch_words(caches: Sequence[object]) -> tuple[str, ...]:
    """One word a cache: `batch-plain`, `batch-rotating-w16`, `batch-quantized-b8-g64`, or as of single sequences."""
    return tuple(_word(cache) for cache in caches)


def _word(cache: object) -> str:
    kind = type(cache).__name__
    if kind == "BatchKVCache":
        return "batch-plain"
    if kind == "BatchRotatingKVCache":
        return f"batch-rotating-w{cache.max_size}"  # type: ignore[attr-defined]
    if kind == "BatchQuantizedKVCache":
        return f"batch-quantized-b{cache.bits}-g{cache.group_size}"  # type: ignore[attr-defined]
    if kind == "CacheList":
        return f"list[{','.join(_word(member) for member in cache.caches)}]"  # type: ignore[attr-defined]
    return cache_words([cache])[0]
